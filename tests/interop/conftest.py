"""Code that exports carry is copied by `transformers` into a folder of the tests' own."""

import atexit
import os
import shutil
import tempfile

# Read once, when transformers is imported.
MODULES = tempfile.mkdtemp(prefix="ddrp-tests-modules-")
os.environ["HF_MODULES_CACHE"] = MODULES
atexit.register(shutil.rmtree, MODULES, ignore_errors=True)
