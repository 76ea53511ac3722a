"""Tasks of the package reasoning-gym: their rows, what is refused, what an answer scores, and a run."""
import json
import types

import pytest

import data
from runs import forked, train
from tasks import reasoning_gym as gym

pytest.importorskip("pyfiglet")     # one of the packages that reasoning_gym needs: requirements-cpu.txt
SUM = "chain_sum,max_terms=2,max_digits=2"


def load(spec, split, count, seed=0):
    return [row for _, row in gym.gym_rows(spec, split, count, seed)]


def test_rows_are_distinct_and_no_seed_trains_on_what_is_held_out():
    held_out = {row["question"] for row in load(SUM, "eval", 200)}
    rows = [load(SUM, "train", 500, seed) for seed in (0, 1, 0)]
    assert rows[0] == rows[2] != rows[1] and len(held_out) == 200
    for some in rows:
        asked = {row["question"] for row in some}
        assert len(asked) == 500 and not asked & held_out
        assert all(row["prompt"] == [{"role": "user", "content": row["question"]}] for row in some)
    # Seeds of the package that differ by 1 have all rows but one in common.
    assert len({row["question"] for row in rows[0]} & {row["question"] for row in rows[1]}) < 250
    assert json.loads(json.dumps(rows[0])) == rows[0]
    settings = types.SimpleNamespace(task=f"reasoning_gym:{SUM}", train_prompts=500, eval_prompts=200, seed=1)
    assert [row for _, row in data.named_rows(settings, "train")] == rows[1]


def test_a_generator_with_few_questions_gives_all_or_says_so():
    few = "chain_sum,max_terms=2,max_digits=1"
    train_rows, eval_rows = load(few, "train", 0), load(few, "eval", 0)
    assert len(train_rows) + len(eval_rows) == 200 and len(eval_rows) > 10      # 10 * 10 numbers, + and -
    with pytest.raises(ValueError, match="max_digits=1 has .* distinct train questions too few"):
        load(few, "train", 190)


def test_several_generators_share_the_count():
    rows = load("chain_sum,max_terms=2+basic_arithmetic,operators=[\"+\", \"-\"],"
                          "allow_parentheses=False+gcd", "train", 100)
    sources = [row["source"] for row in rows]
    assert sources == ["chain_sum"] * 34 + ["basic_arithmetic"] * 33 + ["gcd"] * 33
    assert not any(sign in row["question"] for row in rows[34:67] for sign in "*/(")


@pytest.mark.parametrize("spec, message", [
    ("chainsum", "chainsum cannot be used: ValueError: Dataset 'chainsum' not registered"),
    ("chain_sum,max_trems=3", "cannot be used: TypeError: .* unexpected keyword argument 'max_trems'"),
    ("chain_sum,seed=3", "cannot be used: TypeError: .* multiple values for keyword argument 'seed'"),
    ("chain_sum,max_terms=1", "max_terms must be >= min_terms"),
    ("chain_sum,max_terms=two", "chain_sum cannot be used: TypeError"),
    ("gcd+rush_hour", "rush_hour cannot be used: .*does not accept its own answers"),
    ("boxnet", "does not accept its own answers"), ("graph_color", "does not accept its own answers"),
    ("propositional_logic", "does not accept its own answers"),
    ("rubiks_cube", "does not accept its own answers"),
    ("rearc", "does not accept its own answers, or not after JSON"),
    ("list_functions", "it makes other rows for the same seed"),
    ("word_ladder", "it makes other rows for the same seed, or in another process")])
def test_what_cannot_be_used_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        load(f"{spec}", "train", 200)


def test_a_generator_whose_package_is_left_out_says_so(monkeypatch):
    monkeypatch.setattr("reasoning_gym.algorithmic.game_of_life.cpl", types.ModuleType("cellpylib"))
    with pytest.raises(ValueError, match="game_of_life cannot be used: .*'cellpylib' has no attribute"):
        load("game_of_life", "eval", 2)


def test_an_entry_whose_own_answer_is_not_accepted_is_left_out():
    # The number 0 has no digits.
    rows = load("base_conversion,max_base=10,max_value=50", "train", 300)
    assert all(gym.score(row["answer"], row) == 1.0 for row in rows)


def scores(function, task, texts):
    [row] = load(task, "eval", 1)
    columns = {key: [row[key]] * len(texts) for key in row}
    chats = [[{"role": "assistant", "content": text.replace("RIGHT", row["answer"])}] for text in texts]
    return function(prompts=[row["prompt"]] * len(texts), completions=chats, **columns)


@pytest.mark.parametrize("task", ["chain_sum", "gcd", "spell_backward", "syllogism", "leg_counting", "dice",
                                  "calendar_arithmetic", "caesar_cipher", "base_conversion", "count_primes",
                                  "letter_counting", "number_sorting", "binary_matrix", "tower_of_hanoi"])
def test_a_right_answer_scores_1_in_every_form(task):
    right = ["RIGHT", "Answer: RIGHT", "The answer is RIGHT.", r"So it is \boxed{RIGHT}", "**Answer:** RIGHT",
             "#### RIGHT", "I think so.\n<answer>RIGHT</answer>"]
    wrong = ["I do not know", "Answer: 987", "<answer>xyz</answer>", ""]
    assert scores(gym.gym_score, task, right) == [1.0] * len(right)
    assert scores(gym.full_marks, task, right + wrong) == [1.0] * len(right) + [0.0] * len(wrong)


def test_numbers_are_compared_by_value_and_partial_credit_is_the_package_s():
    [row] = load("chain_sum,max_terms=2,max_digits=1", "eval", 1)
    row |= {"answer": "2"}
    texts = ["1 + 1 = 2", "Answer: 2.0", "The answer is $2$", "Answer: 12", "Answer: 3", "1 + 1 = 3",
             "1 + 1", "3 - 1", "Answer: 4/2", r"\boxed{1+1}", "1 + 1 = 1 + 1", "Answer: 2(1)",
             r"\frac{6}{3}", "Answer: 6:3"]
    columns = {key: [row[key]] * len(texts) for key in row}
    assert gym.gym_score(prompts=[], completions=texts, **columns)[:6] == [1, 1, 1, 0.5, 0, 0]
    # The last eight are not computed.
    assert gym.full_marks(prompts=[], completions=texts, **columns) == [1, 1, 1, 0, 0, 0] + 8 * [0]


def test_a_run_trains_on_two_generators(folder, tmp_path):
    metrics, output = train("train_grpo.py", tmp_path / "run", [
        f"--task=reasoning_gym:{SUM}+spell_backward,max_word_len=4", "--max_steps=2", "--eval_prompts=6",
        "--max_prompt_length=128", "--max_completion_length=8"], {
        "model": folder, "prompts_per_step": 4, "num_generations": 2, "engine": "hf"})
    assert [line["step"] for line in metrics] == [0, 1, 2] and metrics[0]["reward"] >= 0
    for key in ("chain_sum/mean@4", "spell_backward/mean@4", "rewards/gym_score/mean"):
        assert f"eval/{key}" in metrics[0] and f"eval/{key}" in metrics[-1]


def test_without_the_package_one_line_says_so(tmp_path):
    (tmp_path / "without.py").write_text(
        "import runpy, sys\nsys.modules['reasoning_gym'] = None\n"
        "runpy.run_path('train_grpo.py', run_name='__main__')\n")
    output = forked(tmp_path / "log", tmp_path / "without.py", f"--task=reasoning_gym:{SUM}", code=2)
    assert "needs the package reasoning-gym" in output.splitlines()[-1]
