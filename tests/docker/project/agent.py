"""An agent as it is deployed: it knows where its model is and has its key in the environment."""

import sys

from openai import OpenAI

client = OpenAI(base_url="http://sgl-router:8000/v1")
answer = client.chat.completions.create(
    model="policy", messages=[{"role": "user", "content": sys.argv[1]}]
)
print(answer.choices[0].message.content or "")
