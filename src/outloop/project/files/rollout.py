"""Your agent as a function: plays one task and returns its reward."""

from verifier import score


async def play(task, episode):
    # An OpenAI client whose address and key are those of this episode: give it to your agent.
    answer = await episode.client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": task.payload["question"]}],
    )
    return score(answer.choices[0].message.content or "")
