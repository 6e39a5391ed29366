//! The object store: any S3. Every call has a time limit and a bounded number of tries with growing waits (the SDK's), and says whether an object is missing or whether
//! nobody could tell (invariant UNSURE).

use std::time::Duration;

use aws_sdk_s3::{
    Client,
    config::{
        BehaviorVersion, Credentials, Region, RequestChecksumCalculation, ResponseChecksumValidation, retry::RetryConfig,
        timeout::TimeoutConfig,
    },
    error::{ProvideErrorMetadata, SdkError},
    primitives::ByteStream,
    types::{Delete, ObjectIdentifier},
};
use bytes::Bytes;

use crate::{Config, Error, Result, error::Found, kill};

/// Time limit of one try, and of one call with all its tries.
const TRY: Duration = Duration::from_secs(10);
const CALL: Duration = Duration::from_secs(18);
/// Time limit of a streamed upload, which the SDK cannot send again by itself.
const UPLOAD: Duration = Duration::from_secs(600);
const TRIES: u32 = 3;

/// One object of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub key: String,
    pub size: u64,
}

#[derive(Clone)]
pub struct Store {
    client: Client,
    bucket: String,
}

impl Store {
    /// Waits for the store up to `start_wait` and makes the bucket when there is none.
    pub async fn connect(config: &Config) -> Result<Self> {
        let store = Self { client: client(config), bucket: config.s3.bucket.clone() };
        let started = std::time::Instant::now();
        loop {
            match store.ensure_bucket().await {
                Ok(()) => return Ok(store),
                Err(error) => {
                    tracing::warn!(error = error.chain(), "waiting for S3");
                    if started.elapsed() >= config.limits.start_wait {
                        return Err(error);
                    }
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            }
        }
    }

    async fn ensure_bucket(&self) -> Result<()> {
        if self.client.head_bucket().bucket(&self.bucket).send().await.is_ok() {
            return Ok(());
        }
        match self.client.create_bucket().bucket(&self.bucket).send().await {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.code(), Some("BucketAlreadyOwnedByYou" | "BucketAlreadyExists")) => Ok(()),
            Err(error) => Err(failure("make bucket", &self.bucket, &error)),
        }
    }

    /// Does the store answer?
    pub async fn ping(&self) -> Result<()> {
        self.client
            .head_bucket()
            .bucket(&self.bucket)
            .send()
            .await
            .map(|_| ())
            .map_err(|error| failure("look at bucket", &self.bucket, &error))
    }

    pub async fn put(&self, key: &str, body: Bytes) -> Result<()> {
        kill::point("put").await;
        self.client
            .put_object()
            .bucket(&self.bucket)
            .key(key)
            .body(ByteStream::from(body))
            .send()
            .await
            .map_err(|error| failure("put", key, &error))?;
        kill::point("put done").await;
        Ok(())
    }

    /// Puts a file of the local disk without holding it in memory.
    pub async fn put_file(&self, key: &str, path: &std::path::Path) -> Result<()> {
        kill::point("put").await;
        let body = ByteStream::from_path(path).await.map_err(|error| Error::broken(format!("{}: {error}", path.display())))?;
        let limits = aws_sdk_s3::config::Config::builder()
            .timeout_config(TimeoutConfig::builder().operation_attempt_timeout(UPLOAD).operation_timeout(UPLOAD).build());
        self.client
            .put_object()
            .bucket(&self.bucket)
            .key(key)
            .body(body)
            .customize()
            .config_override(limits)
            .send()
            .await
            .map_err(|error| failure("put", key, &error))?;
        kill::point("put done").await;
        Ok(())
    }

    pub async fn get(&self, key: &str) -> Result<Bytes> {
        self.fetch(key, None).await
    }

    /// `length` bytes from `from`; fewer at the object's end, none beyond it.
    pub async fn get_range(&self, key: &str, from: u64, length: u64) -> Result<Bytes> {
        if length == 0 {
            return Ok(Bytes::new());
        }
        self.fetch(key, Some(format!("bytes={from}-{}", from + length - 1))).await
    }

    async fn fetch(&self, key: &str, range: Option<String>) -> Result<Bytes> {
        let answer = self
            .client
            .get_object()
            .bucket(&self.bucket)
            .key(key)
            .set_range(range)
            .send()
            .await
            .map_err(|error| failure("get", key, &error))?;
        let body = tokio::time::timeout(CALL, answer.body.collect()).await;
        match body {
            Ok(Ok(body)) => Ok(body.into_bytes()),
            Ok(Err(error)) => Err(Error::Store { doing: "get", key: key.to_owned(), detail: error.to_string(), found: Found::Unsure }),
            Err(_) => Err(Error::Store { doing: "get", key: key.to_owned(), detail: "timed out".to_owned(), found: Found::Unsure }),
        }
    }

    /// Up to 1,000 objects behind a key, in the order of keys.
    pub async fn list(&self, after: Option<&str>) -> Result<Vec<Listed>> {
        let answer = self
            .client
            .list_objects_v2()
            .bucket(&self.bucket)
            .set_start_after(after.map(str::to_owned))
            .send()
            .await
            .map_err(|error| failure("list", after.unwrap_or_default(), &error))?;
        let listed = answer.contents().iter().filter_map(|object| {
            Some(Listed { key: object.key()?.to_owned(), size: u64::try_from(object.size().unwrap_or(0)).unwrap_or(0) })
        });
        Ok(listed.collect())
    }

    /// Deletes up to 1,000 objects; those that are gone now. Deleting what is not there is fine.
    pub async fn delete_all(&self, keys: &[String]) -> Result<Vec<String>> {
        kill::point("delete").await;
        let Some(first) = keys.first() else { return Ok(Vec::new()) };
        let broken = |error: aws_sdk_s3::error::BuildError| Error::broken(format!("delete: {error}"));
        let objects: Vec<ObjectIdentifier> =
            keys.iter().map(|key| ObjectIdentifier::builder().key(key).build().map_err(broken)).collect::<Result<_>>()?;
        let delete = Delete::builder().set_objects(Some(objects)).quiet(true).build().map_err(broken)?;
        let answer = self
            .client
            .delete_objects()
            .bucket(&self.bucket)
            .delete(delete)
            .send()
            .await
            .map_err(|error| failure("delete", first, &error))?;
        // The answer is 200 even when some were not deleted; it names those.
        for refused in answer.errors() {
            tracing::warn!(key = refused.key(), code = refused.code(), "an object cannot be deleted; tried again later");
        }
        let stays = |key: &String| answer.errors().iter().any(|refused| refused.key() == Some(key.as_str()));
        Ok(keys.iter().filter(|key| !stays(key)).cloned().collect())
    }
}

fn client(config: &Config) -> Client {
    let http = aws_smithy_http_client::Builder::new()
        .tls_provider(aws_smithy_http_client::tls::Provider::Rustls(aws_smithy_http_client::tls::rustls_provider::CryptoMode::Ring))
        .build_https();
    let (request, response) = if config.s3.checksum_when_required {
        (RequestChecksumCalculation::WhenRequired, ResponseChecksumValidation::WhenRequired)
    } else {
        (RequestChecksumCalculation::WhenSupported, ResponseChecksumValidation::WhenSupported)
    };
    let mut builder = aws_sdk_s3::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(http)
        .region(Region::new(config.s3.region.clone()))
        .credentials_provider(Credentials::new(&config.s3.access_key.0, &config.s3.secret_key.0, None, None, "towpath"))
        .retry_config(RetryConfig::standard().with_max_attempts(TRIES))
        .timeout_config(
            TimeoutConfig::builder().connect_timeout(Duration::from_secs(3)).operation_attempt_timeout(TRY).operation_timeout(CALL).build(),
        )
        .request_checksum_calculation(request)
        .response_checksum_validation(response)
        .force_path_style(config.s3.endpoint.is_some());
    if let Some(endpoint) = &config.s3.endpoint {
        builder = builder.endpoint_url(endpoint.as_str());
    }
    Client::from_conf(builder.build())
}

fn failure<E, R>(doing: &'static str, key: &str, error: &SdkError<E, R>) -> Error
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
    R: std::fmt::Debug + 'static,
{
    let missing = matches!(error.code(), Some("NoSuchKey" | "NotFound"));
    let found = if missing { Found::Missing } else { Found::Unsure };
    Error::Store { doing, key: key.to_owned(), detail: chain(error), found }
}

/// An error and what caused it, in words.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let words = cause.to_string();
        // Some errors repeat their cause.
        if !text.ends_with(&words) {
            text.push_str(": ");
            text.push_str(&words);
        }
        source = cause.source();
    }
    text
}
