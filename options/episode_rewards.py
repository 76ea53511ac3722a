"""Scores of episodes: what the environment or the agent gives, and rewards that read the environment.

Runs without episodes do not open this file.
"""
import math

from rewards import Result, Scorer, columns_of


class EpisodeScorer(Scorer):
    """Scores episodes, with two sources of parts more than rewards.Scorer has:

        an environment   a part with the name of its class: the sum of what it gave to an episode's turns
        an agent         a part with its name, or the parts of the dict that it returned

    The reward is the task's own if the settings name no reward, no agent and no environment that gives
    rewards. An episode that failed has no score. Each turn earns what its environment gave to it.
    """

    def __init__(self, settings, sample, device, dtype):
        self.environment = sample.reward_part   # the environment's class if it gives rewards, otherwise ""
        super().__init__(settings, sample, device, dtype, not (self.environment or settings.agent))
        self.at_end = []                        # names of what gives a score at the end of an episode
        if self.user_rewards:
            self.at_end += [reward.name for reward in self.user_rewards.at_end]
        if settings.agent:
            self.at_end.append(sample.name)
        if self.at_end:
            # It is called at the end of each episode, before the environment is reset for another one.
            sample.score_ended = self._score_ended
            self.sources.insert(0, self._ended)
        if self.environment:
            self.sources.append(self._by_environment)

    def check_rewards(self, prompts):
        """Score made-up episodes, as rewards.Scorer does. Return the first prompt as an episode shows it to
        the model, for the console, or "" if it is as in the data.

        Raises InputError also if the environment or the chat template cannot be used.
        """
        trial = self.sample.trial(prompts)
        self._check(trial)
        ids = trial[0].prompt_ids.tolist()
        if ids == prompts[0].ids:
            return ""
        text = self.sample.tokenizer.decode(ids)[-1000:]
        return "\n    ".join(["In an episode the model reads it as", *text.split("\n")])

    def _check_weights(self, names):
        # An agent that fails in the trial is not scored, so its parts are not known yet.
        if not self.at_end:
            super()._check_weights(names)

    def _score_ended(self, rollout, environment):
        # Scores an episode before its environment is reset for the next one. environment: with an agent its
        # agents.AgentSession.
        if self.user_rewards:
            from options.user_rewards import more_columns, score_completions
            columns = more_columns(columns_of([rollout]), [rollout], self.settings)
            columns["environments"] = [environment]
            for reward in self.user_rewards.at_end:
                results = score_completions(reward, columns, reward_errors=self.settings.reward_errors)
                rollout.results += self.user_rewards.with_tokens(results, [rollout])
        if self.settings.agent:
            from options.user_rewards import read_results
            rollout.results += read_results(self.sample.name, [environment.score], [rollout.completion], [{}])

    def _ended(self, rollouts, columns):
        # The source of what _score_ended has found. It was not called for episodes that failed.
        for r in rollouts:
            r.results = r.results or [Result({})] * len(self.at_end)
        named_results = []
        for i, name in enumerate(self.at_end):
            named_results.append((name, [r.results[i] for r in rollouts]))
        for r in rollouts:
            r.results = []
        return named_results

    def _by_environment(self, rollouts, columns):
        # The source of what the environment gave, which the episodes have put into r.rewards. NaN says that
        # an episode is not scored.
        results = []
        for r in rollouts:
            total = sum(r.rewards.values())
            steps = () if math.isnan(total) else r.rewards.items()
            results.append(Result({self.environment: total}, steps))
        return [(self.environment, results)]
