"""The notebook of examples/your_agent runs from top to bottom, and shows pictures."""

import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, in a kernel of its own: a run is driven, plotted while it goes on, and read."""
    folder = tmp_path / "your_agent"
    shutil.copytree(ROOT / "examples/your_agent", folder)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(folder / "notebook.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}})
    client.execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = ["".join(str(output) for output in cell.outputs) for cell in cells]
    assert "up" in shown[1]
    assert "step 10: reward" in shown[2]
    assert all("image/png" in text for text in shown[2:4])
    assert "user/checked_by_hand" in shown[4]
    assert len(cells[5].outputs[0].text.splitlines()) == 3
    assert (folder / "runs/notebook/hf/model.safetensors").is_file()
