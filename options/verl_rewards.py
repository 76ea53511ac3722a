"""Rewards in verl's form: compute_score(data_source, solution_str, ground_truth, extra_info).

A function for a batch has these names in the plural. Runs without such rewards do not open this file.
"""
from rewards import content


def verl_columns(columns, answer_column, tokenizer):
    """Return the columns for a reward of verl's form.

    tokenizer: that of the policy if episodes are scored, otherwise False.
    """
    if tokenizer:
        # It gets an episode as verl decodes it: all that follows the prompt, as one text.
        texts = tokenizer.batch_decode(columns["completion_ids"], skip_special_tokens=True)
        columns = columns | {"completions": texts}
    if answer_column in columns:
        # What the run names as its answer comes before the columns that verl's form looks into.
        truths = columns[answer_column]
        columns = columns | {"ground_truth": truths, "reward_model": truths}
    return columns


def verl_arguments(columns, batch):
    """Return the arguments that verl's form has for the first completion, or its form for a batch for all."""
    if not batch:
        return row_arguments(columns, 0)
    rows = [row_arguments(columns, i) for i in range(len(columns["completions"]))]
    return {f"{key}s": [row.get(key) for row in rows] for key in rows[0]}


def row_arguments(columns, i):
    # Returns the arguments for completion i.
    row = {key: values[i] for key, values in columns.items()}
    arguments = {"data_source": row.get("data_source") or row.get("source"),
                 "solution_str": content(row["completions"]), "extra_info": row.get("extra_info") or {}}
    truths = [row.get("ground_truth"), row.get("answer")]
    if isinstance(row.get("reward_model"), dict):               # verl's rows have the truth in it
        truths.insert(0, row["reward_model"].get("ground_truth"))
    for truth in truths:
        if truth is not None:
            return arguments | {"ground_truth": truth}
    return arguments
