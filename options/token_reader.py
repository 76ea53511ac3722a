"""
The check of a model that reads the policy's tokens. Runs whose settings name neither a critic_model nor a
reference_model do not open this file.
"""
from configurator import InputError
from runtime.model_folder import check_trainable, has_tokenizer, load_tokenizer, read_config


def check_reader(key, path, policy_path, tokenizer, length=0):
    """Return what model_folder.check_trainable returns for the setting `key`.

    policy_path, tokenizer: the policy's. Also raises InputError if the model reads other tokens: if it has a
    tokenizer of its own, tokens that both have must have the same ids.
    """
    path = check_trainable(path, key, tokenizer=False, length=length)
    size = read_config(path).get_text_config().vocab_size
    policy_size = read_config(policy_path).get_text_config().vocab_size
    ids = load_tokenizer(path, key).get_vocab() if has_tokenizer(path) else {}
    differing = [token for token, number in tokenizer.get_vocab().items() if ids.get(token, number) != number]
    # Larger models of some families have more rows in their embedding, which no token needs.
    if size < policy_size or differing:
        raise InputError(f"{key}={path}: it has to read the policy's tokens, but has a vocabulary of {size} "
                         f"for one of {policy_size}, and other ids for {differing[:3] or 'none'}")
    return path
