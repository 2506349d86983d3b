"""Tests of the project.

OpenMP reads its limits when torch is imported: the processes of all tests have one thread each. Not
only would the workers' threads wait for each other; a process with several cannot be forked.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OMP_THREAD_LIMIT"] = "1"
