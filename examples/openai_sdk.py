"""One key per paid call with the official openai package: asks twice, pays once.

    OPENAI_BASE_URL=http://127.0.0.1:8787/v1 OPENAI_API_KEY=... python openai_sdk.py [MODEL]
"""
import sys
import uuid

from openai import OpenAI

client = OpenAI()  # base URL and key from the environment
model = sys.argv[1] if len(sys.argv) > 1 else "gpt-4o-mini"
click = str(uuid.uuid4())  # in an application: made with the click, and stored with it


def ask(stream):
    # A stream is another request than an object, so it is another paid call and has another key.
    key = f"{click}:{'stream' if stream else 'object'}"
    raw = client.chat.completions.with_raw_response.create(
        model=model, max_tokens=64, stream=stream, messages=[{"role": "user", "content": "Say something short."}],
        extra_headers={"Idempotency-Key": key})
    answer = raw.parse()
    text = "".join(c.choices[0].delta.content or "" for c in answer if c.choices) if stream \
        else answer.choices[0].message.content
    print(f"{raw.headers['Semel-Outcome']:9} {text!r}")
    return text


for stream in (False, True):
    assert ask(stream) == ask(stream)
