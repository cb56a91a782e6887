"""A config file that the tests of this folder load."""

import pytest

FILE = '''"""A config."""
from hyjax.config import base, parse_arg


def get_config(arg=""):
    arg = parse_arg(arg, tiny=False, width=128, rate=3e-3, layout="GGAG")
    width = 32 if arg.tiny else arg.width
    model = dict(layout=arg.layout, width=width, legend=dict(A=dict(kv_heads=2, ffn=None)))
    return base(seed=3, model=model, optimizer=dict(learning_rate=arg.rate))
'''


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("configs") / "example.py"
    file.write_text(FILE)
    return str(file)
