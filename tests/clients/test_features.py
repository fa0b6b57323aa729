"""Options of the default build that need a feature which it lacks. The Rust tests have all features in CI."""
import subprocess

import pytest
from serving import EXAMPLES


@pytest.mark.parametrize("role", [["frontend", "--schedulers", "127.0.0.1:1"], ["serve", str(EXAMPLES / "models")]])
def test_an_option_for_ucx_says_how_to_build_with_it(binary, role):
    refused = subprocess.run([str(binary), *role, "--ucx", "auto"], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 2 and "`cargo build --release --features ucx` adds it" in refused.stderr, refused


def test_the_server_is_built_without_ucx(binary):
    assert b"libucp.so" not in binary.read_bytes()
