"""What the torch server answers to group calls that do not fit: 400, and it lives on unchanged."""

from collections.abc import Callable
from typing import Any

import pytest

GROUP = {"group_name": "none", "load_format": "flattened_bucket"}
WHOLE = {"names": ["model.norm.weight"], "dtypes": ["float32"], "shapes": [[64]]}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/destroy_weights_update_group", {"group_name": "none"}, "was not joined"),
        ("/update_weights_from_distributed", GROUP | WHOLE, "was not joined"),
        (
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1",
                "master_port": 9,
                "rank_offset": 1,
                "world_size": 2,
                "backend": "carrier_pigeon",
            },
            "allowed: gloo, nccl",
        ),
    ],
)
def test_calls_that_do_not_fit_are_refused(
    torch_server: Any,
    post: Callable[..., Any],
    greedy: Callable[..., Any],
    path: str,
    body: dict[str, Any],
    says: str,
) -> None:
    """No such group, or no such backend."""
    before = greedy(torch_server.url)["output_ids"]
    assert post(torch_server.url, "/begin_weight_update", {})[0] == 200
    status, answer = post(torch_server.url, path, body)
    assert (status, answer["success"]) == (400, False)
    assert says in answer["message"]
    assert post(torch_server.url, "/end_weight_update", {})[0] == 200
    assert greedy(torch_server.url)["output_ids"] == before


def test_a_broadcast_outside_a_session_is_refused(torch_server: Any, post: Any) -> None:
    """As by SGLang, and before anything is received."""
    status, answer = post(torch_server.url, "/update_weights_from_distributed", GROUP | WHOLE)
    assert status == 400
    assert "between begin_weight_update and end_weight_update" in answer["message"]


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes"),
    [
        ([], [], []),
        (["a"], ["float32"], []),
        (["a"], ["float33"], [[1]]),
        (["a"], ["nn"], [[1]]),
        (["a"], ["float32"], [[-1]]),
        (["a", "b"], ["int8", "float32"], [[1], [4]]),
    ],
)
def test_lists_that_describe_no_bucket_are_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]]
) -> None:
    """Unequal lengths, unknown dtypes, negative sizes, unaligned starts."""
    from outloop.engine.serve.torch_server.weight_update import UpdateRefused
    from outloop.engine.serve.torch_server.weight_update_groups import lay_out

    with pytest.raises(UpdateRefused):
        lay_out(names, dtypes, shapes)
