"""What tests of compiled models need."""

import shutil
import tempfile

import pytest

from recapp.inference.build_cpp import missing_tools

# torch gives its compiler the names of temporary files without quotes
BLANKS = " " in tempfile.gettempdir()
NO_PROGRAM = bool(missing_tools()) or BLANKS

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or BLANKS,
    reason="torch.compile needs a C++ compiler (apt-get install g++) and a TMPDIR without blanks",
)
needs_program = pytest.mark.skipif(
    NO_PROGRAM,
    reason="needs cmake, a C++ compiler (apt-get install cmake g++) and a TMPDIR without blanks",
)
