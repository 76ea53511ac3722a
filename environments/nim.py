"""A game for two, which a policy plays against itself: recipes/rae.diff runs it."""
import json
import re
from urllib.request import Request, urlopen


def say(base_url, api_key, player, text):
    """Return what the policy answers to a text as this player."""
    body = {"model": player, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def play(base_url, api_key, row):
    """Return the rewards of both players. In turn they take 1 to 3 stones; who takes the last one wins.

    A player who takes more than there are, or says no such number, loses.
    """
    stones = row.get("stones", 7)
    player, other = "first", "second"
    while True:
        text = say(base_url, api_key, player, f"Take 1 to 3 of {stones} stones.")
        taken = re.search("[1-9]", text)
        if not taken or int(taken[0]) > min(stones, 3):
            return {player: -1.0, other: 1.0}
        stones -= int(taken[0])
        if stones == 0:
            return {player: 1.0, other: -1.0}
        player, other = other, player
