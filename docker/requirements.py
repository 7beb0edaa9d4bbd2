"""Print the requirements of outloop and of the extras named, so that an image layer holds them.

python requirements.py EXTRA...
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
chosen = list(project["dependencies"])
for extra in sys.argv[1:]:
    chosen += project["optional-dependencies"][extra]
sys.stdout.write("".join(f"{requirement}\n" for requirement in dict.fromkeys(chosen)))
