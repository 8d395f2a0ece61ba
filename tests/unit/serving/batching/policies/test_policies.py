"""One file and one line add a policy: a toy shows it."""

from __future__ import annotations

import subprocess
import sys

from support.patience import PATIENCE_S

TOY = """
from orchestray.serving.batching.policies import POLICIES, Policy


class Patient(Policy):
    needs_timeout = True

    def __init__(self, timeout_ms):
        self.timeout_ms = timeout_ms

    def wait_s(self, opportunity):
        return self.timeout_ms / 1e3


POLICIES["patient"] = Patient

from pydantic import ValidationError
from orchestray.serving.batching.policies import make_policy, timeout_problem
from orchestray.serving.config.schema import BatchingSection

assert "patient" in BatchingSection.model_json_schema()["properties"]["policy"]["enum"]
section = BatchingSection(policy="patient", timeout_ms=2.0)
assert make_policy(section.policy, timeout_ms=section.timeout_ms).wait_s(None) == 0.002
assert "needs it" in timeout_problem("patient", None)
try:
    BatchingSection(policy="impatient")
except ValidationError:
    print("refused")
"""


def test_one_file_and_one_line_add_a_policy_that_is_checked_and_in_the_schema() -> None:
    toy = TOY.replace("\nfrom pydantic", "\nimport orchestray.serving.batching.policies as policies\nfrom pydantic")
    done = subprocess.run([sys.executable, "-c", toy], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr
