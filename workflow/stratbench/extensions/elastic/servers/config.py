"""Config of a parameter server that can be restarted, and whose workers join and leave."""

from __future__ import annotations

from dataclasses import dataclass

from stratbench.extensions.servers.ps.server_config import ServerConfig


@dataclass(frozen=True)
class ElasticConfig:
    """Config of an elastic parameter server in addition to that of other servers.

    Attributes:
        folder: Folder that all hosts share, with the files that restarted servers need.
        incarnation: Number of this start of the servers, from 1.
        resumes_saved_state: Whether the servers resume from their saved state.
        save_interval_s: Seconds between two writes of the state.
        target_score: Score of an epoch with which the training ends; None for all epochs.
        higher_is_better: Whether a higher score is better.
    """

    folder: str
    incarnation: int = 1
    resumes_saved_state: bool = False
    save_interval_s: float = 60.0
    target_score: float | None = None
    higher_is_better: bool = True


@dataclass(frozen=True, kw_only=True)
class ElasticServerConfig(ServerConfig):
    """The complete config of an elastic server process."""

    elastic: ElasticConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.elastic, dict):  # a config that was read from JSON has a dict here
            object.__setattr__(self, "elastic", ElasticConfig(**self.elastic))
