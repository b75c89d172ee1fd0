"""Adapters that clients load and unload at run time, by the API of vLLM's server."""

from __future__ import annotations

import threading
from typing import Any

from mpjax.errors import CheckpointError
from mpjax.files.json_text import json_text
from mpjax.language_model import LanguageModel
from mpjax.serve.errors import MODEL_NOT_FOUND, NOT_OFFERED, RequestError
from mpjax.serve.keys import read_keys
from mpjax.serve.requests import require_object
from mpjax.serve.tables import LOAD_ADAPTER, UNLOAD_ADAPTER


class ServedAdapters:
    """The adapters of a server's model. Clients pass an adapter's name as `model`.

    base: the model's own name. most: the limit of adapters at a time, including unloaded ones that
    requests still use; 0: clients can't load adapters.
    """

    def __init__(self, lm: LanguageModel, base: str, most: int) -> None:
        if base in lm.adapters.names:
            raise ValueError(f"{base!r} is the name of the model and of an adapter: rename one")
        self.lm, self.base, self.most = lm, base, most
        self._lock = threading.Lock()  # held from counting the adapters until one is added

    def find(self, name: str | None) -> str | None:
        """The adapter that a client names; None for the model itself.

        Raises RequestError for an unknown name.
        """
        if name is None or name == self.base:
            return None
        names = self.lm.adapters.names
        if name not in names:
            known = ", ".join(json_text(each, 80) for each in [self.base, *names])
            message = f"there is no model {json_text(name, 80)}: this server has {known}"
            raise RequestError(message, "model", 404, MODEL_NOT_FOUND)
        return name

    def load(self, lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> str:
        """Adds the adapter in a body. Raises RequestError, which names the key."""
        values = self._read(body, LOAD_ADAPTER, ignore_unknown)
        name, replace = values["lora_name"], values["load_inplace"]
        if values["lora_path"] is None:
            raise RequestError("lora_path is missing: expected an adapter's folder", "lora_path")
        with self._lock:
            names = lm.adapters.names
            if name == self.base or (name in names and not replace):
                message = f"lora_name is {json_text(name, 80)}, which is there: unload it first"
                raise RequestError(message, "lora_name")
            if lm.adapters.would_hold(name) > self.most:
                raise RequestError(
                    f"there is room for {self.most} adapters: unload one first, or wait for the "
                    "requests of those that were removed"
                )
            try:
                lm.add_adapter(name, values["lora_path"], replace=replace)
            except CheckpointError as error:
                raise RequestError(str(error), "lora_path") from error
            except ValueError as error:
                raise RequestError(str(error)) from error
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, lm: LanguageModel, body: Any, ignore_unknown: bool = False) -> str:
        """Removes the adapter in a body. Raises RequestError, which names the key."""
        name = self._read(body, UNLOAD_ADAPTER, ignore_unknown)["lora_name"]
        with self._lock:
            if name not in lm.adapters.names:
                message = f"lora_name is {json_text(name, 80)}, and there is no such adapter"
                raise RequestError(message, "lora_name", 404, MODEL_NOT_FOUND)
            lm.remove_adapter(name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _read(self, body: Any, table: Any, ignore_unknown: bool) -> Any:
        if not self.most:
            message = "this server loads no adapters: start it with --max-adapters"
            raise RequestError(message, status=403, code=NOT_OFFERED)
        values = read_keys(require_object(body), table, ignore_unknown)
        if not values["lora_name"]:
            raise RequestError("lora_name is missing: expected an adapter's name", "lora_name")
        return values
