"""Chat and completion, streamed and not, against ``examples/serve.sh``.

python examples/client.py [BASE_URL]            # default http://127.0.0.1:8000/v1
"""

import sys

from openai import OpenAI

BASE_URL = "http://127.0.0.1:8000/v1"


def main() -> None:
    client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else BASE_URL, api_key="unused")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "What is 17 + 25? Answer in one sentence."}]
    options = {"model": model, "max_tokens": 48, "temperature": 0.0}

    chat = client.chat.completions.create(messages=messages, **options)
    print("chat:               ", repr(chat.choices[0].message.content))

    parts = []
    for chunk in client.chat.completions.create(messages=messages, stream=True, **options):
        if chunk.choices and chunk.choices[0].delta.content:
            parts.append(chunk.choices[0].delta.content)  # several tokens when drafts are accepted
    print(f"chat, {len(parts):3} deltas:   ", repr("".join(parts)))

    prompt = "The first five prime numbers are"
    completion = client.completions.create(prompt=prompt, **options)
    print("completion:         ", repr(completion.choices[0].text))

    parts = [
        chunk.choices[0].text
        for chunk in client.completions.create(prompt=prompt, stream=True, **options)
        if chunk.choices
    ]
    print(f"completion, {len(parts):3} deltas:", repr("".join(parts)))


if __name__ == "__main__":
    main()
