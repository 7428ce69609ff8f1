"""The exception tree.

GaplessError                    base; `status` is the HTTP status, `code` is for machines
├── ConfigError                 an option is wrong or two contradict; exit code 2
├── ModelLoadError              a model file is missing, damaged or unknown; exit code 2
├── RequestError        400     a request is wrong; `param` names the field
│   ├── AuthenticationError  401  no key, or a wrong one
│   ├── ForbiddenError  403     the key is not enough, or the route is off
│   ├── NotFoundError   404
│   ├── ConflictError   409     a request id that is still alive
│   └── TooLargeError   413
├── CapacityError       503     no room for the request, now or ever; it may be sent elsewhere
├── AbortedError        499     the client has gone
├── DeadlineError       408     the request's own timeout was over before it had any output: its limit, not ours
├── UnavailableError    503     loading, draining or dead
└── InternalError       500     the engine failed; the request is not to blame
"""

from __future__ import annotations

from typing import Any


class GaplessError(Exception):
    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON error body, of the shape that OpenAI's clients read."""
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error" if self.status < 500 else "server_error",
                "param": self.param,
                "code": self.code,
            }
        }


class ConfigError(GaplessError):
    code = "bad_option"


class ModelLoadError(GaplessError):
    code = "bad_model"


class RequestError(GaplessError):
    status = 400
    code = "invalid_value"


class AuthenticationError(RequestError):
    status = 401
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    status = 403
    code = "forbidden"


class NotFoundError(RequestError):
    status = 404
    code = "not_found"


class ConflictError(RequestError):
    status = 409
    code = "duplicate_request_id"


class TooLargeError(RequestError):
    status = 413
    code = "too_large"


class CapacityError(GaplessError):
    status = 503
    code = "capacity"


class AbortedError(GaplessError):
    status = 499
    code = "aborted"


class DeadlineError(GaplessError):
    status = 408
    code = "timeout"


class UnavailableError(GaplessError):
    status = 503
    code = "unavailable"


class InternalError(GaplessError):
    status = 500
    code = "internal_error"
