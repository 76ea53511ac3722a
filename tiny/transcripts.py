"""
Conversations that the small model of config/guess.py and config/calculator.py has read: games of
guess_number.py and arithmetic with calculator.py, seldom played well. pretrain.py reads them by
config/episodes_base.py.

In most games the player talks before it plays, and in many it guesses only near the middle of the numbers
that are left. In arithmetic it mostly answers without the tool, which is wrong. GRPO has to find out what
pays. No prompt here is one of a held-out problem, but every number has been played.

compose is for config/compose_base.py: answers for the small model of config/compose.py. Each carries out
operations of its prompt, every one of them correctly, but in a random order and only a random number of them.
GRPO has to find out that the order is that of the prompt.
"""
from tasks.generate_problems import arithmetic_problem, carried_out, chain, guess_problem, held_out

# What the chat template reads of the calculator's schema.
TOOLS = [{"function": {"name": "calculate", "parameters": {"properties": {"expression": {}}}}}]


def problem(rng, generator):
    # A problem with a prompt of the train split.
    text, columns = generator(rng, 1)
    while held_out(text):
        text, columns = generator(rng, 1)
    return [{"role": "user", "content": text}], columns


def game(rng):
    messages, columns = problem(rng, guess_problem)
    number, low, high = columns["number"], 1, 64
    talks, near = rng.choice([0, 1, 1, 2, 2, 2, 3, 3]), rng.random() < 0.5
    for turn in range(6):
        spread = (high - low) // 4 * near
        guess = (low + high) // 2 + rng.randint(-spread, spread)
        if turn < talks:
            said, heard = rng.choice(["Let me think.", "A number?", "Hm."]), "A number from 1 to 64, please."
        elif guess < number:
            said, heard, low = str(guess), "higher", guess + 1
        else:
            said, heard, high = str(guess), "lower", guess - 1
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": heard}]
        if said == str(number):
            break
    # The game is over after the right guess or the last one, and nothing is said to either.
    return None, messages[:-1]


def arithmetic(rng):
    messages, columns = problem(rng, arithmetic_problem)
    question, answer = messages[0]["content"], columns["answer"]
    if rng.random() < 0.8:
        wrong = str(int(answer) + rng.randint(-300, 300))
        return TOOLS, messages + [{"role": "assistant", "content": f"Answer: {wrong}"}]
    call = {"name": "calculate", "arguments": {"expression": question.removeprefix("What is ")[:-1]}}
    return TOOLS, messages + [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "calculate", "content": answer},
        {"role": "assistant", "content": f"Answer: {answer}"}]


def draw(rng):
    return game(rng) if rng.random() < 0.6 else arithmetic(rng)


def compose(rng):
    depth = rng.choice([1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8])
    digits, order = chain(rng, depth)
    while held_out(text := f"{digits} {''.join(order)}"):
        digits, order = chain(rng, depth)
    read = carried_out(digits, rng.sample(order, rng.randint(1, depth)))
    return None, [{"role": "user", "content": text}, {"role": "assistant", "content": read}]
