"""Trajectories for supervised training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from outloop.buffer.codec.records_codec import MAX_RECORD_BYTES
from outloop.buffer.errors import Gone, RecordError
from outloop.buffer.records import Trajectory
from outloop.buffer.writer import BufferWriter

MakeTrajectory = Callable[..., Trajectory]


async def test_trajectories_are_streamed_in_order_once_per_key(
    start: Callable[..., Any], make_trajectory: MakeTrajectory
) -> None:
    """More than one page, repeated calls, and the final flag."""
    loop = await start(trainer__mode="sft")
    assert loop.reader.sft_progress() == (0, False)
    assert list(loop.reader.sft_trajectories()) == []
    everything = [make_trajectory(f"s{index}") for index in range(150)]
    for begin, final in ((0, False), (75, True)):
        for _ in range(2):
            await loop.writer.put_trajectories(
                everything[begin : begin + 75], key=f"from {begin}", final=final
            )
    assert loop.reader.sft_progress() == (150, True)
    stored = list(loop.reader.sft_trajectories())
    assert [t.episode for t in stored] == [t.episode for t in everything]
    assert stored[149].turns[0].turn_id == "s149.0"


async def test_other_purposes_are_refused(
    start: Callable[..., Any], make_trajectory: MakeTrajectory
) -> None:
    """What is to be trained by RL must be claimed and played."""
    loop = await start()
    with pytest.raises(RecordError, match="purpose='train'"):
        await loop.writer.put_trajectories(
            [make_trajectory("s0", purpose="train")], key="k", final=False
        )


@pytest.mark.medium
async def test_a_record_that_is_refused_midway_stores_none(
    start: Callable[..., Any], make_trajectory: MakeTrajectory
) -> None:
    """Others of the call were on their way already; the next call gets its own answers."""
    loop = await start(trainer__mode="sft")
    small = [make_trajectory(f"s{index}") for index in range(3)]
    large = make_trajectory("s3", num_output=MAX_RECORD_BYTES // 8)
    with pytest.raises(RecordError, match=f"at most {MAX_RECORD_BYTES} are allowed"):
        await loop.writer.put_trajectories([*small, large], key="k", final=True)
    assert loop.reader.sft_progress() == (0, False)
    await loop.writer.put_trajectories(small, key="k", final=True)
    assert loop.reader.sft_progress() == (3, True)
    assert len(list(loop.reader.sft_trajectories())) == 3


async def test_large_and_small_words_arrive_as_they_are(
    start: Callable[..., Any], make_trajectory: MakeTrajectory
) -> None:
    """Records below and above what is sent at once, over several windows."""
    loop = await start(trainer__mode="sft")
    sizes = [1, 340, 341, 342, 5000, 40_000, 2, 100_000, 3]
    everything = [make_trajectory(f"s{index}", num_output=size) for index, size in enumerate(sizes)]
    await loop.writer.put_trajectories(everything, key="k", final=True)
    stored = list(loop.reader.sft_trajectories())
    assert [len(t.turns[0].output_ids) for t in stored] == sizes
    assert all(
        t.turns[0].output_ids.tolist() == list(range(n)) for t, n in zip(stored, sizes, strict=True)
    )


async def test_records_of_which_one_expired_on_the_way_are_not_stored(
    start: Callable[..., Any], make_trajectory: MakeTrajectory, clients: Any
) -> None:
    """More than the script can ask about at once, the last one gone: none is kept, nor the key."""
    loop = await start(trainer__mode="sft")
    everything = [make_trajectory(f"s{index}", num_output=1) for index in range(1002)]
    reader = loop.reader

    class LateClient(redis.asyncio.Redis):
        """Its scripts arrive when the last staged record has expired."""

        async def execute_command(self, *args: Any, **options: Any) -> Any:
            if args[0] == "EVALSHA":
                token, number = args[-2:]
                reader.client.delete(reader.key(f"staged:{token}:{number - 1}"))
            return await super().execute_command(*args, **options)

    late = await BufferWriter.connect(
        reader.run,
        connect_client=lambda url: LateClient.from_pool(clients.asynchronous(url).connection_pool),
    )
    with pytest.raises(Gone, match="staged too long ago"):
        await late.put_trajectories(everything, key="k", final=True)
    await late.close()
    assert loop.reader.sft_progress() == (0, False)
    await loop.writer.put_trajectories(everything, key="k", final=True)
    assert loop.reader.sft_progress() == (1002, True)


async def test_what_cannot_be_read_is_left_out_and_not_removed(
    start: Callable[..., Any], make_trajectory: MakeTrajectory, tmp_path: Path
) -> None:
    """Damage, or a record of another release, costs one trajectory, not the training; its bytes
    stay where they are, and an export says how many it left out."""
    loop = await start(trainer__mode="sft")
    everything = [make_trajectory(f"s{index}") for index in range(5)]
    await loop.writer.put_trajectories(everything, key="k", final=True)
    client, key = loop.reader.client, loop.reader.key
    client.set(key("sft:1"), b"rubbish")
    client.set(key("sft:3"), b"\x09\x00" + client.get(key("sft:3"))[2:])
    stored = list(loop.reader.sft_trajectories())
    assert [t.episode.episode_id for t in stored] == ["s0", "s2", "s4"]
    assert client.get(key("sft:1")) == b"rubbish"
    assert loop.reader.archive.write(tmp_path / "all.jsonl") == (3, 2)
