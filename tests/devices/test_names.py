import subprocess
import sys


def test_the_names_are_known_without_pytorch() -> None:
    code = "import sys, finetune.devices.names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
