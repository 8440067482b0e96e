"""Errors in the shape of OpenAI's API, which its clients turn into exceptions of their own.

https://platform.openai.com/docs/guides/error-codes
"""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self._param = param
        self._code = code

    def as_json(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self._param, "code": self._code}}


KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
