"""An agent of two turns for tests/golden.py. What it says depends only on what it hears."""
import asyncio
import json
import urllib.request


def ask(base_url, api_key, messages):
    """Return the message that the policy answers with."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"Authorization": f"Bearer {api_key}"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


async def solve(base_url, api_key, row):
    """Score how many of the number's digits are in the second answer."""
    messages = list(row["prompt"])
    messages.append(await asyncio.to_thread(ask, base_url, api_key, messages))
    messages.append({"role": "user", "content": f"{len(messages[-1]['content'])} letters. Again."})
    answer = await asyncio.to_thread(ask, base_url, api_key, messages)
    digits = set(row["answer"])
    return len(digits & set(answer["content"])) / len(digits)
