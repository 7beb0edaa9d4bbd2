"""What an earlier request said is not read again, and makes no difference."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from outloop.router.dialects.chat_request import decode
from outloop.router.refusals import Refusal

_texts = st.text(max_size=12) | st.sampled_from(['"}', "],[", "\\", ",", "]", "\u2028"])
_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"])})
    .flatmap(lambda m: st.builds(lambda text: {**m, "content": text}, _texts))
    .flatmap(lambda m: st.sampled_from([m, {**m, "name": "n"}])),
    min_size=1,
    max_size=6,
)


def body(messages: list, *, indent: int | None = None) -> bytes:
    """A request as some client writes it."""
    return json.dumps({"model": "m", "messages": messages, "stop": "x"}, indent=indent).encode()


@given(_messages, _messages, st.sampled_from([None, 1]), st.sampled_from([None, 1]))
def test_a_body_reads_the_same_after_any_other(one, two, indent, other_indent) -> None:
    """Whatever was said before, and however it was written, a request means what it says."""
    earlier = decode(body(one, indent=indent)).told
    for messages in (one, two, one + two, one[:-1] or one, two + one):
        sent = body(messages, indent=other_indent)
        assert replace(decode(sent, earlier), told=None) == replace(decode(sent), told=None)


def test_what_is_repeated_is_not_read_again() -> None:
    """The messages of an extended conversation are those that the earlier request made."""
    said = [{"role": "user", "content": "hi"}]
    earlier = decode(body(said))
    again = decode(body([*said, {"role": "assistant", "content": "ho"}]), earlier.told)
    assert again.messages[0] is earlier.messages[0]
    assert decode(body(said), earlier.told).messages is earlier.messages


@pytest.mark.parametrize("wrong", [{"role": "user", "content": 3}, {"role": "nobody"}, 7])
def test_a_wrong_message_is_named_by_its_place(wrong) -> None:
    """A refusal says the same whether the messages before it were known or not."""
    said = [{"role": "user", "content": "hi"}, {"role": "user", "content": "ho"}]
    earlier = decode(body(said)).told
    sent = body([*said, wrong])
    refusals = []
    for known in (None, earlier):
        with pytest.raises(Refusal) as refused:
            decode(sent, known)
        refusals.append((str(refused.value), refused.value.param))
    assert refusals[0] == refusals[1]
    assert "messages[2]" in (refusals[0][1] or "")
