"""What an earlier request said is not read again, and makes no difference."""

import hashlib
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from outloop.router.dialects.body_digest import digest
from outloop.router.dialects.chat_request import decode
from outloop.router.errors import Refusal
from outloop.router.servers.generate_api import Prompt

_texts = st.text(max_size=12) | st.sampled_from(['"}', "],[", "\\", ",", "]", "\u2028"])
_messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"])})
    .flatmap(lambda m: st.builds(lambda text: {**m, "content": text}, _texts))
    .flatmap(lambda m: st.sampled_from([m, {**m, "name": "n"}])),
    min_size=1,
    max_size=6,
)


def body(messages: list, *, indent: int | None = None, model: str = "m") -> bytes:
    """A request as some client writes it."""
    said = {"messages": messages, "stop": "x", "model": model}
    return json.dumps(said, indent=indent).encode()


@given(_messages, _messages, st.sampled_from([None, 1]), st.sampled_from([None, 1]))
def test_a_body_reads_the_same_after_any_other(one, two, indent, other_indent) -> None:
    """Whatever was said before, and however it was written, a request means what it says."""
    first = decode(body(one, indent=indent)).told
    second = decode(body(one + two, indent=indent), first).told
    for earlier in (first, second):
        for messages in (one, two, one + two, one + two + two, one[:-1] or one, two + one):
            for model in ("m", "another"):
                sent = body(messages, indent=other_indent, model=model)
                assert replace(decode(sent, earlier), told=None) == replace(decode(sent), told=None)


def test_what_is_repeated_is_not_read_again() -> None:
    """The messages of an extended conversation are those that the earlier request made."""
    said = [{"role": "user", "content": "hi"}]
    earlier = decode(body(said))
    again = decode(body([*said, {"role": "assistant", "content": "ho"}]), earlier.told)
    assert again.messages[0] is earlier.messages[0]
    assert decode(body(said), earlier.told).messages is earlier.messages


def test_what_is_not_a_message_is_read_once() -> None:
    """From the third request on that says more and nothing else, only its new messages are read."""
    said = [{"role": "user", "content": f"{i}"} for i in range(5)]
    told, asked = None, []
    for number in range(1, 6):
        request = decode(body(said[:number]), told)
        told = request.told
        asked.append(request.asked)
    assert asked[2] is asked[4]
    assert decode(body(said)[:-1] + b', "temperature": 0.5}', told).asked == {"temperature": 0.5}


def test_a_message_that_the_policy_goes_on_with_is_each_requests_own() -> None:
    """The beginning of an answer is that of the request that brings it."""
    told = None
    for texts in (["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]):
        said = [{"role": "assistant", "content": text} for text in texts]
        request = decode(body(said)[:-1] + b', "continue_final_message": true}', told)
        told = request.told
        assert (request.prefill, len(request.messages)) == (texts[-1], len(texts) - 1)


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


@pytest.mark.parametrize(
    "after",
    [
        b', {"role": "user", "content": "x"}], "messages": [{"role": "user", "content": "other"}]}',
        b', {"role": "user", "content": "x"}], "tools": [], "mess\\u0061ges": [{"role": "user"}]}',
        b', {"role": "user", "content": "messages"}], "model": "another"}',
        b" , ]}",
        b"]",
        b', {"role": "user", "content": "\xff"}]}',
    ],
)
@pytest.mark.parametrize(
    "before",
    [b"", b'"x": [{"role": "user", "content": "hi"}], ', b'"messages": [{"role": "user"}], '],
)
def test_a_list_is_gone_on_with_only_where_it_is_the_messages(before, after) -> None:
    """Keys given twice, equal lists elsewhere and broken ends read as they do without a past."""
    start = b'{"model": "m", ' + before + b'"messages": [{"role": "user", "content": "hi"}'
    first = decode(start + b"]}").told
    more = start + b', {"role": "user", "content": "more"}'
    second = decode(more + b"]}", first).told
    read = []
    for known in (None, first):
        try:
            read.append(replace(decode(start + after, known), told=None))
        except Refusal as refused:
            read.append((str(refused), refused.param))
    for known in (None, second):
        try:
            read.append(replace(decode(more + after, known), told=None))
        except Refusal as refused:
            read.append((str(refused), refused.param))
    assert read[:2] == [read[0]] * 2
    assert read[2:] == [read[2]] * 2


@given(_messages, _messages, st.sampled_from([None, 1]))
def test_a_digest_depends_on_the_body_alone(one, two, indent) -> None:
    """Requests meet by their bodies and paths, whichever the process had heard before them."""
    heard = None
    for messages in (one, one + two, one + two, two, one + two + one, one):
        for path in (b"chat/completions", b"completions"):
            sent = body(messages, indent=indent)
            told = decode(sent, heard.told if heard is not None else None).told
            found, heard = digest(path, sent, told, heard)
            assert found == hashlib.sha256(path + b"\0" + sent).hexdigest()[:32]


@given(st.lists(st.lists(st.integers(0, 99_999), max_size=40), max_size=40))
def test_a_prompt_is_the_text_of_its_ids_in_few_pieces(parts) -> None:
    """A conversation's ids are sent as their JSON, however they came; pieces shrink by half."""
    prompt = Prompt()
    for ids in parts:
        prompt = prompt.followed_by(ids)
    whole = [token for ids in parts for token in ids]
    assert (prompt.num_ids, prompt.text) == (
        len(whole),
        json.dumps(whole)[1:-1].replace(" ", "").encode(),
    )
    sizes = [len(piece) for piece in prompt.pieces]
    assert all(one >= 2 * other for one, other in pairwise(sizes))
