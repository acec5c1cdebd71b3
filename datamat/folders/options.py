"""Translate options of fsspec's filesystems for S3, Google and Azure (s3fs, gcsfs, adlfs) to those of obstore.

obstore's own options pass unchanged, and it refuses unknown ones. Options about fsspec's caches and threads, or about
writing, are left out; options that obstore cannot fulfil are refused with an alternative.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from datamat.errors import OptionError

S3_SCHEMES = ("s3", "s3a")
GOOGLE_SCHEMES = ("gs", "gcs")
AZURE_SCHEMES = ("az", "abfs", "abfss")
OBJECT_SCHEMES = (*S3_SCHEMES, *GOOGLE_SCHEMES, *AZURE_SCHEMES)
_S3 = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "anon": "skip_signature",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "requester_pays": "request_payer",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "aws_region": "region",
    "aws_default_region": "region",
    "default_region": "region",
    "aws_endpoint": "endpoint",
    "aws_endpoint_url": "endpoint",
    "aws_skip_signature": "skip_signature",
    "aws_checksum_algorithm": "checksum_algorithm",
    "username": "access_key_id",
    "password": "secret_access_key",
}
_S3_OF_REQUESTS = {
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
    "BucketKeyEnabled": "sse_bucket_key_enabled",
}
_LEFT_OUT_OF_GOOGLE = frozenset({"access", "default_location", "project", "secure_serialize", "timeout"})
_CREDENTIALS = frozenset({"application_credentials", "bearer_token", "service_account", "service_account_key"})
_AZURE = {"sas_token": "sas_key", "anon": "skip_signature"}
_LEFT_OUT = frozenset(
    {"asynchronous", "block_size", "cache_options", "cache_regions", "cache_timeout", "check_connection", "consistency",
     "default_block_size", "default_cache_type", "default_fill_cache", "dircache", "fill_cache",
     "fixed_upload_size", "listings_expiry_time", "loop", "max_concurrency", "max_paths", "requests_timeout",
     "retries", "session_kwargs", "skip_instance_cache", "use_listings_cache", "version_aware"}
)  # fmt: skip
_LEFT_OUT_OF_CONFIG = frozenset({"max_pool_connections", "retries", "tcp_keepalive", "user_agent_extra"})


def configured(scheme: str) -> dict[str, Any]:
    """Return the options for a scheme in fsspec's own configuration: `FSSPEC_S3_KEY` and the like, and files."""
    folder = os.environ.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
    if not os.path.isdir(folder) and not any(name.startswith("FSSPEC_") for name in os.environ):
        return {}  # the usual case; importing fsspec takes a while
    from fsspec.config import conf

    alike = next(schemes for schemes in (S3_SCHEMES, GOOGLE_SCHEMES, AZURE_SCHEMES) if scheme in schemes)
    return {name: value for one in alike for name, value in conf.get(one, {}).items()}


def translated(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the equivalent options of obstore.

    Raises:
        OptionError: an option has no equivalent; says what to give instead.
    """
    said = {name: value for name, value in options.items() if name not in _LEFT_OUT}
    said_in = _s3 if scheme in S3_SCHEMES else _google if scheme in GOOGLE_SCHEMES else _azure
    found = said_in(said)
    address = found.get("endpoint") or found.get("base_url")
    if address and "://" not in str(address):
        raise OptionError("the endpoint has no scheme; want it as in http://127.0.0.1:9000 or https://HOST")
    if str(address).startswith("http:"):
        found["client_options"] = {"allow_http": True, **found.get("client_options", {})}
    return {name: value for name, value in found.items() if value is not None and value is not False}


def _s3(said: dict[str, Any]) -> dict[str, Any]:
    client = dict(said.pop("client_options", None) or {})
    more = dict(said.pop("client_kwargs", None) or {})
    said_of_requests = dict(said.pop("s3_additional_kwargs", None) or {})
    verify = more.pop("verify", True)
    if verify is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        with open(verify) as file:
            client["root_certificate"] = file.read()
    if said.pop("use_ssl", True) is False:
        client["allow_http"] = True
    config, found = dict(said.pop("config_kwargs", None) or {}), {}
    for name in ("read_timeout", "connect_timeout"):
        if name in config:
            client[name] = f"{config.pop(name)}s"
    style = dict(config.pop("s3", None) or {})
    if (addressing := style.pop("addressing_style", "auto")) in ("virtual", "path"):
        found["virtual_hosted_style_request"] = addressing == "virtual"
    if config.pop("signature_version", None) == "UNSIGNED":
        found["skip_signature"] = True
    unknown = sorted([*(more.keys() - _S3.keys()), *(config.keys() - _LEFT_OUT_OF_CONFIG), *style])
    if unknown:
        raise OptionError(
            f"client_kwargs or config_kwargs hold {', '.join(unknown)}, which reading S3 does not know; leave it out, "
            "or give client_options= as obstore takes them"
        )
    found |= {_S3.get(name, name): value for name, value in {**said, **more}.items()}
    found |= _of_requests(said_of_requests)
    if address := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
        found.setdefault("endpoint", address)
    return {**found, "client_options": client} if client else found


def _of_requests(said: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(said.keys() - _S3_OF_REQUESTS.keys()):
        raise OptionError(
            f"s3_additional_kwargs hold {', '.join(unknown)}, which would not reach S3; leave it out, and set it for "
            f"the bucket if you need it; want some of {', '.join(_S3_OF_REQUESTS)}"
        )
    return {_S3_OF_REQUESTS[name]: value for name, value in said.items()}


def _google(said: dict[str, Any]) -> dict[str, Any]:
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")  # read by Google's client, but not by obstore
    address = said.pop("endpoint_url", None) or said.pop("base_url", None) or emulator
    payer, project = said.pop("requester_pays", None), said.get("project") or os.environ.get("GOOGLE_CLOUD_PROJECT")
    found = {name: value for name, value in said.items() if name not in _LEFT_OUT_OF_GOOGLE}
    if address:
        found["base_url"] = (address if "://" in address else f"http://{address}").rstrip("/")
    if token := found.pop("token", None):
        found |= _of_token(token)
    elif address and (address == emulator or found["base_url"].startswith("http:")) and not _CREDENTIALS & found.keys():
        found["skip_signature"] = True  # like Google's client; and no token is sent unencrypted
    if found.get("skip_signature"):
        found["bearer_token"] = "anonymous"  # noqa: S105 -- otherwise, obstore signs writes as this machine
    if payer:
        if not isinstance(payer, str) and not project:
            raise OptionError("requester_pays needs the project that pays; give requester_pays='PROJECT', or project=")
        client = found.get("client_options") or {}
        headers = {"x-goog-user-project": payer if isinstance(payer, str) else project}
        found["client_options"] = {**client, "default_headers": {**headers, **client.get("default_headers", {})}}
    return found


def _of_token(token: Any) -> dict[str, Any]:
    """Translate the `token` of gcsfs."""
    if token == "anon":  # noqa: S105 -- the name of a sign-in method, like those below
        return {"skip_signature": True}
    if token == "google_default":  # noqa: S105
        return {}
    if token == "cloud":  # noqa: S105
        return {"token": token}  # for the code that opens the store, which asks the machine
    if isinstance(token, Mapping) and token.get("type") == "service_account":
        return {"service_account_key": json.dumps(dict(token))}
    if isinstance(token, str) and os.path.isfile(path := os.path.expanduser(token)):
        return {"application_credentials": os.path.abspath(path)}
    if isinstance(token, str) and token not in ("browser", "cache") and not token.endswith(".json"):
        return {"bearer_token": token}
    raise OptionError(
        "token is to be 'google_default', 'cloud', 'anon', the path of a file of credentials, the content of that of a "
        "service account, or an access token; after 'gcloud auth application-default login', leave it out"
    )


def _azure(said: dict[str, Any]) -> dict[str, Any]:
    if not said.keys() & {"connection_string", "account_name", "account_key", "sas_token", "sas_key"}:
        said["connection_string"] = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")  # as adlfs does
    text, credential = said.pop("connection_string", None) or "", said.pop("credential", None)
    if "account_host" in said:
        said["endpoint"] = f"https://{said.pop('account_host')}"
    if credential is not None and not isinstance(credential, str):
        raise OptionError("credential is to be a text: a key, or a shared access signature")
    if credential:
        said["sas_token" if "sig=" in credential else "account_key"] = credential
    found = {**_of_connection_string(text), **{_AZURE.get(name, name): value for name, value in said.items()}}
    if isinstance(found.get("sas_key"), str):
        found["sas_key"] = found["sas_key"].removeprefix("?")
    return found


def _of_connection_string(text: str) -> dict[str, Any]:
    parts = {name.strip().lower(): value for name, _, value in (one.partition("=") for one in text.split(";")) if value}
    if text and not parts.keys() & {"accountname", "blobendpoint", "usedevelopmentstorage"}:
        raise OptionError("connection_string names neither AccountName nor BlobEndpoint")
    if parts.get("usedevelopmentstorage", "").lower() == "true":
        return {"use_emulator": True}
    names = {"accountname": "account_name", "accountkey": "account_key", "sharedaccesssignature": "sas_key"}
    found = {names[name]: value for name, value in parts.items() if name in names}
    account, suffix = parts.get("accountname"), parts.get("endpointsuffix", "core.windows.net")
    protocol = parts.get("defaultendpointsprotocol", "https")
    if endpoint := parts.get("blobendpoint"):
        found["endpoint"] = endpoint.rstrip("/")
        found.setdefault("account_name", endpoint.partition("://")[2].partition(".")[0])
    elif account and (suffix, protocol) != ("core.windows.net", "https"):
        found["endpoint"] = f"{protocol}://{account}.blob.{suffix}"
    return found
