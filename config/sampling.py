"""
Settings of the training scripts and of evaluate_model.py: how a prompt is written, which tokens are sampled,
what replies to the model, and how its answers are scored. config/shared.py imports them for the training
scripts.
"""
# ------------------------------------------------------------------------------------------------------------
# prompts
prompt_column = ""              # the column of your file that holds the prompt, where a text becomes a
                                # user's message; if empty, prompt, messages or conversations
prompt_format = ""              # in the place of prompt_column, a text that names columns, for example
                                # '{instruction}\n{input}', where \n is a line end
answer_column = ""              # the column that holds the answer; if empty, answer, ground_truth or solution
chat = True                     # apply the chat template to messages; False joins them, for base models
system_prompt = ""              # put before every message prompt, for example to ask for \boxed{}
chat_template = ""              # a file with a Jinja template that takes the place of the tokenizer's
chat_template_kwargs = ""       # arguments of the template, as JSON: {"enable_thinking": false}
images = ""                     # frozen or trained: rows may show images, and the layers that see them stay
                                # as they are or are trained as well: docs/images.md
# sampling: docs/recipes.md
top_p = 1.0                     # sample from the likeliest tokens that together have this probability
top_k = 0                       # sample from this many likeliest tokens; 0 samples from all
min_p = 0.0                     # sample from tokens with at least this share of the largest probability; in
                                # training top_p and min_p need a top_k
stop = ""                       # strings that end an answer, with commas between, where \n is a line end:
                                # </answer>,\nUser: or others; the text of the answer ends before them
# reward
reward_errors = "stop"          # when a reward raises, stop ends the run, unscored leaves the completion
                                # without a score, and zero scores it 0. A call that takes too long, or has no
                                # time to begin, does not end the run: with stop it counts as unscored
reward_weights = ""             # name:weight,... of rewards, their parts, an environment or reward_model; all
                                # other names have the weight 1
# episodes: docs/episodes.md
environment = ""                # file.py:Class; if empty, an answer is one turn and nothing replies to it
tools = ""                      # file.py:function,... that the model may call, with or without an environment
agent = ""                      # file.py:function that asks the policy through an endpoint: docs/agents.md
max_turns = 0                   # answers in an episode; 0 sets no limit except max_completion_length, which
                                # counts all turns and replies
max_environments = 0            # instances per rank; further episodes wait for one; 0 sets no limit
# all code of yours
call_timeout = 60.0             # seconds for a call of your code: a reward (a batch, then each completion
                                # alone), a judge, an environment or tool that is async or in a thread; 0 sets
                                # no limit and calls rewards in this process
call_workers = 0                # calls of async rewards at a time (0: 64), and threads for environments; only
                                # with 0 do episodes repeat bit for bit
# ------------------------------------------------------------------------------------------------------------
