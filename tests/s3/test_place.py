"""The place of a bucket, as users write it."""

import pytest

from kvfs.s3.place import BucketPlace


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://my.bucket-1/kv", "my.bucket-1", "kv/"),
        ("s3://bucket/a/b_c=1.x/", "bucket", "a/b_c=1.x/"),
    ],
)
def test_places(url: str, bucket: str, prefix: str) -> None:
    place = BucketPlace.parse(url)
    assert (place.bucket, place.prefix) == (bucket, prefix)
    assert BucketPlace.parse(str(place)) == place


@pytest.mark.parametrize(
    "url",
    [
        *("", "bucket", "s3:/bucket", "s3://", "s3://A", "s3://a", "s3://-ab", "s3://bucket//a"),
        *("s3://bucket/a b", "s3://bucket/../x", "s3://bucket/.", "s3://bucket/.kvfs/x"),
        *("s3://bucket/é", "s3://bucket/%41", "s3://bucket/a@1", "s3://user:secret@bucket/x"),
        *("s3://bucket?x=y", "s3://bucket/" + "x" * 201, "http://bucket/a", "s3://bucket\n"),
    ],
)
def test_malformed_url_of_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"s3://BUCKET|a prefix of"):
        BucketPlace.parse(url)


@pytest.mark.parametrize("text", ["http://127.0.0.1:9000", "https://s3.x.org", "http://[::1]:80/"])
def test_endpoints(text: str) -> None:
    assert BucketPlace.parse("s3://bucket", endpoint=text, region="r", profile="p") == BucketPlace(
        "bucket", "", text, "r", "p"
    )


@pytest.mark.parametrize(
    "text", ["", "s3.x.org", "http://u:p@x", "http://x/path", "http://x?q", "ftp://x"]
)
def test_malformed_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an endpoint such as"):
        BucketPlace.parse("s3://bucket", endpoint=text)
