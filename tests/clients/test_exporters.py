"""Models as the frameworks' exporters write them: Downbeat's answers are those of the framework itself.

Models of packages that install fast are made here. Those of PyTorch, Keras and transformers are in `exported`, where
`tools/exporters.py` put them. `DOWNBEAT_EXPORTERS` names a folder with all models of that script."""
import os
import pathlib
import re
import sys

import pytest

from serving import ROOT, Server

sys.path.insert(0, str(ROOT / "tools"))
from exported import judge  # noqa: E402

STORED = pathlib.Path(__file__).parent / "exported"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The models of scikit-learn, LightGBM and XGBoost, exported now."""
    from exported import light

    folder = tmp_path_factory.mktemp("exported")
    for name, make in light.GROUP.items():
        make().save(folder / name)
    return folder
