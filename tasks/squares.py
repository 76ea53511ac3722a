"""
Problems about pictures, for --task=squares: how many squares of 8 x 8 pixels are red, blue or green.
"""
import io

from PIL import Image

from options.images import MARK, data_uri

COLOURS = {"red": (230, 30, 30), "blue": (30, 30, 230), "green": (30, 200, 30)}


def squares_problem(rng, difficulty):
    """Return a problem, as tasks/generate_problems.py describes it. Its `name` tells it apart from others,
    because many have the same text. All difficulties are the same."""
    picture = Image.new("RGB", (32, 32), "white")
    places = rng.sample(range(16), 16)
    counts = {colour: rng.randint(1, 5) for colour in COLOURS}
    name = []
    for colour, count in counts.items():
        for _ in range(count):
            place = places.pop()
            left = place % 4 * 8
            top = place // 4 * 8
            picture.paste(COLOURS[colour], (left, top, left + 8, top + 8))
            name.append(place)
    file = io.BytesIO()
    picture.save(file, "PNG")
    colour = rng.choice([*COLOURS])
    text = f"{MARK}How many squares are {colour}?"
    answer = str(counts[colour])
    return text, {"answer": answer, "source": "squares", "solution": answer,
                  "images": [data_uri(file.getvalue())], "name": f"{colour} {counts} {name}"}
