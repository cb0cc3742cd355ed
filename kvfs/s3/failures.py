"""botocore's exceptions, translated into kvfs's errors.

Contract: `translated` lets no exception of botocore out. Every store has codes of its own beside
the usual ones, so the HTTP status decides if the code is unknown. Messages have the code, never the
store's own text, which may repeat bytes of the request.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from botocore import exceptions as of_botocore  # type: ignore[import-untyped]
from botocore.parsers import ResponseParserError  # type: ignore[import-untyped]

from kvfs.s3.errors import (
    NoBucketError,
    NoObjectError,
    OutageError,
    RefusedError,
    StoreError,
    StoreFullError,
    ThrottledError,
    WrongBytesError,
)

_QUERY = re.compile(r"\?[^\s\"']*")
_CREDENTIALS = "check the credentials that boto3 finds and what they permit"
_REGION = "give the bucket's region"
_CLOCK = "set the clock of this machine, or the store's"

_THROTTLED = {
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "ServiceUnavailable",
    "Throttling",
    "ThrottlingException",
    "RequestThrottled",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
    "TooManyRequests",
    "ConditionalRequestConflict",  # another writer publishes this name at the moment
    "OperationAborted",
}
_FULL = {
    "QuotaExceeded",
    "InsufficientStorage",
    "ServiceQuotaExceeded",
    "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded",
}
_DAMAGED = {
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "InvalidDigest",
    "IncompleteBody",
    "InvalidPart",
    "InvalidPartOrder",
    "InvalidRange",
}
_BODILESS = {"HeadObject"}  # a HEAD has no body, so its 404 is ambiguous: see `store.is_listed`
_MISSING = {"NoSuchKey", "NoSuchUpload", "NotFound"}
_CURES = {
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
}
_NO_CREDENTIALS = (
    of_botocore.NoCredentialsError,
    of_botocore.PartialCredentialsError,
    of_botocore.CredentialRetrievalError,
    of_botocore.ProfileNotFound,
    of_botocore.TokenRetrievalError,
    of_botocore.NoAuthTokenError,
    of_botocore.SSOError,
    of_botocore.LoginError,
)
_OUT = (
    of_botocore.ConnectionError,
    of_botocore.HTTPClientError,
    of_botocore.IncompleteReadError,
    of_botocore.MetadataRetrievalError,
)

# botocore's parsers raise these for malformed XML, numbers, dates and headers.
_NONSENSE = (ResponseParserError, ValueError, TypeError, OverflowError, RuntimeError)


def failure_of(
    code: str,
    status: int,
    what: str,
    *,
    missing: type[StoreError] = NoObjectError,
    precondition: type[StoreError] = StoreError,
) -> StoreError:
    """The error for a store's code and HTTP status (0: not known).

    missing, precondition: what 404 and 412 mean for this request.
    """
    told = f"{what}: {code or 'no code'}" + (f", HTTP {status}" if status else "")
    if code == "NoSuchBucket":
        return NoBucketError(told)
    if code in _FULL or status == 507:  # noqa: PLR2004
        return StoreFullError(told)
    # The answer to a HEAD has no code, and S3 itself says 503 for nothing else.
    if code in _THROTTLED or status == 429 or code == "503":  # noqa: PLR2004
        return ThrottledError(told)
    if code in _DAMAGED or status == 416:  # noqa: PLR2004
        return WrongBytesError(told)
    if code == "PreconditionFailed" or status == 412:  # noqa: PLR2004
        return precondition(told)
    if code in _CURES:
        return RefusedError(f"{told}; {_CURES[code]}")
    if code in _MISSING or status == 404:  # noqa: PLR2004
        return missing(told)
    if code == "NotImplemented" or status == 501:  # noqa: PLR2004
        return RefusedError(told)
    if status >= 500 or code in {"InternalError", "RequestTimeout"}:  # noqa: PLR2004
        return OutageError(told)
    if status in {301, 307}:
        return RefusedError(f"{told}; {_REGION}")
    return RefusedError(f"{told}; {_CREDENTIALS}" if status in {401, 403} else told)


@contextmanager
def translated(
    what: str,
    *,
    missing: type[StoreError] = NoObjectError,
    precondition: type[StoreError] = StoreError,
) -> Iterator[None]:
    """Raise botocore's exceptions from the block as a StoreError that begins with `what`."""
    try:
        yield
    except of_botocore.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code") or "")
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if status == 404 and code in {"", "404"} and error.operation_name not in _BODILESS:  # noqa: PLR2004
            raise OutageError(
                f"{what}: HTTP 404 without a code: the endpoint is no S3 store"
            ) from error
        raise failure_of(code, status, what, missing=missing, precondition=precondition) from error
    except _NO_CREDENTIALS as error:
        named = f" ({error})" if isinstance(error, of_botocore.ProfileNotFound) else ""
        raise RefusedError(f"{what}: {type(error).__name__}{named}; {_CREDENTIALS}") from error
    except of_botocore.NoRegionError as error:
        raise RefusedError(f"{what}: no region is known; {_REGION}") from error
    except _OUT as error:
        name, text = type(error).__name__, _QUERY.sub("", str(error))  # without queries of URLs
        raise OutageError(f"{what}: {name}: {text}") from error
    except of_botocore.BotoCoreError as error:
        raise StoreError(f"{what}: {type(error).__name__}: {error}") from error
    except RecursionError as error:
        raise OutageError(f"{what}: redirected too often") from error  # botocore follows
    except KeyError as error:
        raise OutageError(f"{what}: the answer has no {error}") from error
    except _NONSENSE as error:
        name = type(error).__name__
        raise OutageError(f"{what}: the answer is not from S3 ({name}): is it a store?") from error
