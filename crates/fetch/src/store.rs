//! Objects of object stores: S3 and servers like it, Google Cloud Storage, Azure Blob Storage.

use std::sync::Arc;
use std::time::Duration;

use downbeat_repository::{few, is_onnx_name};
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, RetryConfig,
};
use url::Url;

use crate::FetchOptions;
use crate::aws_profile;
use crate::body::Body;
use crate::failure::FetchError;
use crate::listing::{Listing, MOST_FILES, RemoteFile, SMALL, beside, check_path};

/// An object of an object store, or all objects below a prefix.
#[derive(Debug)]
pub(crate) struct Store {
    store: Arc<dyn ObjectStore>,
    url: Url,
    prefix: Path,
}

/// The remedy if a store refuses access.
fn hint(scheme: &str) -> &'static str {
    match scheme {
        "s3" | "s3a" => {
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for a public bucket set \
             AWS_SKIP_SIGNATURE=true; for another server than Amazon's set AWS_ENDPOINT_URL"
        }
        "gs" => {
            "set GOOGLE_APPLICATION_CREDENTIALS to a file of credentials, or GOOGLE_SKIP_SIGNATURE=true for a public bucket"
        }
        _ => {
            "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_KEY), or \
             AZURE_SKIP_SIGNATURE=true for a public container"
        }
    }
}

impl Store {
    pub(crate) fn new(url: Url, options: &FetchOptions) -> Result<Self, FetchError> {
        let wrong = |error: Error| FetchError::Address(format!("{url}: {error}; {}", hint(url.scheme())));
        let store: Arc<dyn ObjectStore> = match url.scheme() {
            "s3" | "s3a" => Arc::new(s3(&url, options)?.build().map_err(wrong)?),
            "gs" => Arc::new(gcs(&url, options).build().map_err(wrong)?),
            _ => Arc::new(azure(&url, options).build().map_err(wrong)?),
        };
        let decoded = url.path().trim_matches('/');
        let prefix = Path::from_url_path(decoded).map_err(|error| FetchError::Address(format!("{url}: {error}")))?;
        Ok(Store { store, url, prefix })
    }

    /// Looks up the object, or lists the objects below the prefix.
    pub(crate) async fn look(&self) -> Result<Listing, FetchError> {
        if is_onnx_name(self.prefix.as_ref()) {
            let meta = self.store.head(&self.prefix).await.map_err(|error| self.failed(&error))?;
            return Ok(Listing { files: vec![remote_file(meta, "model.onnx")], ..Listing::default() });
        }
        let prefix = Some(&self.prefix).filter(|prefix| !prefix.as_ref().is_empty());
        let objects = self.store.list(prefix).take(MOST_FILES + 1).try_collect::<Vec<ObjectMeta>>();
        let objects = objects.await.map_err(|error| self.failed(&error))?;
        let (mut files, mut others) = (Vec::new(), Vec::new());
        for meta in objects {
            let path = match self.prefix.as_ref() {
                "" => meta.location.as_ref(),
                prefix => meta.location.as_ref().strip_prefix(prefix).unwrap_or_default().trim_start_matches('/'),
            };
            // Markers of the folder itself, and hidden files such as those of git.
            if path.is_empty() || path.split('/').any(|part| part.starts_with('.')) {
                continue;
            }
            let path = path.to_owned();
            let is_small = meta.size <= SMALL;
            let of = if is_onnx_name(&path) || is_small { &mut files } else { &mut others };
            of.push(remote_file(meta, &path));
        }
        let is_model = |file: &RemoteFile| is_onnx_name(&file.path) || file.path.contains(".emulated.");
        if !files.iter().any(is_model) {
            let all: Vec<&str> = files.iter().chain(&others).map(|file| file.path.as_str()).collect();
            let message = match all[..] {
                [] => format!("{}: no object begins with this prefix; check the bucket and the prefix", self.url),
                _ => format!("{}: no ONNX file below this prefix; there are: {}", self.url, few(&all)),
            };
            return Err(FetchError::NoModel(message));
        }
        Ok(Listing { revision: None, files, others, note: None })
    }

    /// Looks up external data beside the model.
    pub(crate) async fn find(&self, model: &RemoteFile, location: &str) -> Result<RemoteFile, FetchError> {
        check_path(location)?;
        let key = beside(&model.locator, location);
        let key = Path::parse(&key).map_err(|error| FetchError::Answer(error.to_string()))?;
        let meta = self.store.head(&key).await.map_err(|error| self.failed(&error))?;
        Ok(remote_file(meta, &beside(&model.path, location)))
    }

    /// Reads an object from the byte `from` on, if it is still the same object.
    pub(crate) async fn read(&self, file: &RemoteFile, from: u64) -> Result<Body, FetchError> {
        let key = Path::parse(&file.locator).map_err(|error| FetchError::Answer(error.to_string()))?;
        let range = (from > 0).then_some(GetRange::Offset(from));
        let options = GetOptions { range, if_match: file.tag.clone(), ..GetOptions::default() };
        let got = self.store.get_opts(&key, options).await.map_err(|error| match error {
            Error::Precondition { .. } => FetchError::Changed(file.path.clone()),
            error => self.failed(&error),
        })?;
        let (from, size) = (got.range.start, Some(got.meta.size));
        let bytes = got.into_stream().map_err(|error| error.to_string());
        Ok(Body { from, size, bytes: bytes.boxed() })
    }

    /// The error of a request.
    fn failed(&self, error: &Error) -> FetchError {
        let (url, text) = (&self.url, causes(error));
        let hint = hint(url.scheme());
        let bucket = url.host_str().unwrap_or_default();
        let is = |words: &[&str]| words.iter().any(|word| text.contains(word));
        if is(&["NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist"]) {
            return FetchError::Missing(format!("{url}: there is no bucket '{bucket}'"));
        }
        match error {
            Error::NotFound { .. } => FetchError::Missing(format!("{url}: there is no such object")),
            Error::Unauthenticated { .. } | Error::PermissionDenied { .. } => {
                FetchError::Denied(format!("{url}: access is refused; {hint}"))
            }
            _ if is(&["403 Forbidden", "AccessDenied", "401 Unauthorized"]) => {
                FetchError::Denied(format!("{url}: access is refused; {hint}"))
            }
            _ if is(&["169.254.169.254", "metadata.google", "latest/api/token", "computeMetadata"]) => {
                FetchError::Denied(format!("{url}: there are no credentials; {hint}"))
            }
            _ if is(&["301 Moved", "307 Temporary", "bare redirect", "Received redirect without"]) => {
                FetchError::Answer(format!(
                    "{url}: the bucket is in another region; set AWS_REGION to the region of the bucket"
                ))
            }
            _ if is(&["error sending request", "timed out", "timeout", "connect", "dns error", "status code: 5"]) => {
                FetchError::Unreachable(format!("{url} does not answer: {text}"))
            }
            _ => FetchError::Answer(format!("{url}: {text}")),
        }
    }
}

/// An error in words, with its causes.
fn causes(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    text
}

fn remote_file(meta: ObjectMeta, path: &str) -> RemoteFile {
    let ObjectMeta { location, size, e_tag, .. } = meta;
    let (path, locator) = (path.to_owned(), location.to_string());
    RemoteFile { path, locator, size: Some(size), tag: e_tag, expected: None }
}

fn client(options: &FetchOptions) -> ClientOptions {
    let clients = ClientOptions::new().with_connect_timeout(options.timeout).with_read_timeout(options.timeout);
    clients.with_timeout_disabled().with_allow_http(true)
}

fn retries(options: &FetchOptions) -> RetryConfig {
    let backoff = BackoffConfig { init_backoff: Duration::from_millis(250), ..BackoffConfig::default() };
    RetryConfig { max_retries: 2, retry_timeout: options.timeout * 2, backoff }
}

fn s3(url: &Url, options: &FetchOptions) -> Result<AmazonS3Builder, FetchError> {
    let mut builder = AmazonS3Builder::new();
    let profile = aws_profile::variables(options)?;
    for (name, value) in options.variables.iter().chain(&profile) {
        let key =
            name.starts_with("AWS_").then(|| name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>().ok()).flatten();
        if let Some(key) = key.filter(|_| !value.is_empty()) {
            builder = builder.with_config(key, value);
        }
    }
    let bucket = url.host_str().unwrap_or_default();
    Ok(builder.with_bucket_name(bucket).with_client_options(client(options)).with_retry(retries(options)))
}

fn gcs(url: &Url, options: &FetchOptions) -> GoogleCloudStorageBuilder {
    let mut builder = GoogleCloudStorageBuilder::new();
    for (name, value) in &options.variables {
        let key =
            name.starts_with("GOOGLE_").then(|| name.to_ascii_lowercase().parse::<GoogleConfigKey>().ok()).flatten();
        if let Some(key) = key.filter(|_| !value.is_empty()) {
            builder = builder.with_config(key, value);
        }
    }
    // The variable of Google's own emulator clients.
    if let Some(endpoint) = options.variable("STORAGE_EMULATOR_HOST") {
        let endpoint = if endpoint.contains("://") { endpoint.to_owned() } else { format!("http://{endpoint}") };
        builder =
            builder.with_config(GoogleConfigKey::BaseUrl, endpoint).with_config(GoogleConfigKey::SkipSignature, "true");
    }
    let bucket = url.host_str().unwrap_or_default();
    builder.with_bucket_name(bucket).with_client_options(client(options)).with_retry(retries(options))
}

fn azure(url: &Url, options: &FetchOptions) -> MicrosoftAzureBuilder {
    let mut builder = MicrosoftAzureBuilder::new();
    for (name, value) in &options.variables {
        let key = name.starts_with("AZURE_").then(|| name.to_ascii_lowercase().parse().ok()).flatten();
        if let Some(key) = key.filter(|_| !value.is_empty()) {
            builder = builder.with_config(key, value);
        }
    }
    builder.with_url(url.as_str()).with_client_options(client(options)).with_retry(retries(options))
}
