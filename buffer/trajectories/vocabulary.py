"""The policy's vocabulary beside the archive, to show a token without its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import structlog

from outloop.buffer.whole_file import whole_file

VOCABULARY = "vocabulary.parquet"
_log = structlog.get_logger()


def load_tokenizer(model_path: Path) -> Any:
    """The tokenizer of a Hugging Face folder; None, with a line in the log, if there is none."""
    from tokenizers import Tokenizer

    path = model_path / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the package raises plain Exception
        _log.warning("texts_not_archived", path=str(path), reason=str(error))
        return None


def write_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Write each id's text into `folder`, once."""
    path = folder / VOCABULARY
    if tokenizer is None or path.exists():
        return
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    ids = list(range(size))
    texts = [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
    table = pa.table({"id": pa.array(ids, pa.int32()), "text": pa.array(texts, pa.string())})
    with whole_file(path) as writing:
        pq.write_table(table, writing, compression="zstd")
