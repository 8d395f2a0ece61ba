"""The imports of the process that measurements are forked from: those that workers are forked with, and the dry runs.

So a dry run has imported what a worker has, and what its process grows by is what a worker's grows by.
"""

from orchestray.platform.cluster import worker_template

worker_template.import_modules()

from orchestray.trainers.planning import counting, dry_run, served  # noqa: E402, F401 - after the variables that torch reads
