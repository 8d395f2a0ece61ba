#!/usr/bin/env bash
# Run every check of this folder, one after the other; further arguments, as --cpu, go to each. Exit status 1: one fails.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH="$here/..:$here/../../src${PYTHONPATH:+:$PYTHONPATH}"
failed=0
for check in "$here"/check_[0-9]*.py; do
    # Beyond its own limit of 180 s a check is stuck where Python cannot end it.
    timeout -k 5 240 "${PYTHON:-python3}" -P "$check" "$@"
    status=$?
    if [ "$status" -ge 124 ]; then
        name=$(basename "$check" .py)
        echo "FAIL ${name#check_}: it did not end within 240 s"
    fi
    [ "$status" -eq 0 ] || failed=1
done
exit "$failed"
