//! Repositories of a hub: the protocol that Hugging Face's client speaks.

use std::fs;
use std::path::PathBuf;

use downbeat_repository::{few, is_onnx_name};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use serde::Deserialize;
use url::Url;

use crate::FetchOptions;
use crate::address::HUB;
use crate::body::Body;
use crate::digest::{Expected, is_digest};
use crate::failure::FetchError;
use crate::listing::{Listing, MOST_FILES, RemoteFile, SMALL, beside, check_path};
use crate::remote::{body, no_answer, refusal};

/// Largest description of a repository, bytes.
const MOST_BYTES: usize = 32 << 20;

/// The files that come along from the folder of the model or the top of the repository.
const COMPANIONS: [&str; 4] = ["config.pbtxt", "tokenizer.json", "labels.txt", "preprocessor_config.json"];

/// The ONNX files that a repository means by its model, the first the best.
const USUAL: [&str; 2] = ["model.onnx", "onnx/model.onnx"];

/// A repository of a hub.
#[derive(Debug)]
pub(crate) struct Hub {
    endpoint: Url,
    repository: String,
    revision: String,
    file: Option<String>,
    token: Option<String>,
    client: Client,
    /// The folder where the hub's own client keeps this repository.
    known: Option<PathBuf>,
}

/// The description of a revision.
#[derive(Deserialize)]
struct Description {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: Option<u64>,
}

impl Hub {
    pub(crate) fn new(
        (repository, revision, file): (String, String, Option<String>),
        options: &FetchOptions,
        client: Client,
    ) -> Result<Self, FetchError> {
        let endpoint = options.variable("HF_ENDPOINT").unwrap_or(HUB);
        let endpoint = Url::parse(&format!("{}/", endpoint.trim_end_matches('/')))
            .map_err(|error| FetchError::Address(format!("HF_ENDPOINT '{endpoint}': {error}")))?;
        let of_user = || Some(options.user_cache()?.join("huggingface"));
        let hub_home = options.variable("HF_HOME").map(PathBuf::from).or_else(of_user);
        let kept = options.variable("HF_HUB_CACHE").map(PathBuf::from);
        let kept = kept.or_else(|| hub_home.as_ref().map(|home| home.join("hub")));
        let known = kept.map(|kept| kept.join(format!("models--{}", repository.replace('/', "--"))));
        let token_file = options.variable("HF_TOKEN_PATH").map(PathBuf::from);
        let token_file = token_file.or_else(|| hub_home.map(|home| home.join("token")));
        let written = || token_file.and_then(|file| fs::read_to_string(file).ok());
        let given = options.variable("HF_TOKEN").or(options.variable("HUGGING_FACE_HUB_TOKEN")).map(str::to_owned);
        let token = given.or_else(written).map(|token| token.trim().to_owned()).filter(|token| !token.is_empty());
        Ok(Hub { endpoint, repository, revision, file, token, client, known })
    }

    fn url(&self, parts: &[&str]) -> Result<Url, FetchError> {
        let mut url = self.endpoint.clone();
        let mut segments = url.path_segments_mut().map_err(|()| {
            FetchError::Address(format!("HF_ENDPOINT '{}' is not the address of a hub", self.endpoint))
        })?;
        segments.pop_if_empty().extend(parts.iter());
        drop(segments);
        Ok(url)
    }

    async fn get(&self, url: Url, with: impl FnOnce(RequestBuilder) -> RequestBuilder) -> Result<Response, FetchError> {
        let request = with(self.client.get(url));
        let request = match &self.token {
            Some(token) => request.bearer_auth(token),
            None => request,
        };
        let response = request.send().await.map_err(|error| no_answer(&error))?;
        if response.status().is_success() { Ok(response) } else { Err(self.refused(&response)) }
    }

    /// The error of an answer. The hub says 401 also for repositories that do not exist.
    fn refused(&self, response: &Response) -> FetchError {
        let (status, repository) = (response.status(), &self.repository);
        let code = response.headers().get("x-error-code").and_then(|code| code.to_str().ok()).unwrap_or_default();
        let of_revision = format!("hf://{repository}@{}", self.revision);
        match (code, status) {
            ("RevisionNotFound", _) => {
                FetchError::Missing(format!("{of_revision}: the repository has no such revision"))
            }
            ("EntryNotFound", _) => FetchError::Missing(format!("{of_revision}: the repository has no such file")),
            ("GatedRepo", _) => FetchError::Denied(format!(
                "hf://{repository}: the owner asks for an agreement; accept it on {}{repository}, and set HF_TOKEN to \
                 the token of that account",
                self.endpoint
            )),
            ("RepoNotFound", _) | (_, StatusCode::UNAUTHORIZED) if self.token.is_none() => {
                FetchError::Missing(format!(
                    "hf://{repository}: no such repository, or it is private ({status}); check the name, or set HF_TOKEN"
                ))
            }
            ("RepoNotFound", _) => FetchError::Missing(format!(
                "hf://{repository}: no such repository, or the token in use may not read it ({status})"
            )),
            _ => refusal(status, &of_revision, "check HF_TOKEN: a token may have expired, or lack this repository"),
        }
    }

    /// Looks up the commit and its files.
    pub(crate) async fn look(&self) -> Result<Listing, FetchError> {
        let mut parts: Vec<&str> = vec!["api", "models"];
        parts.extend(self.repository.split('/'));
        parts.extend(["revision", &self.revision]);
        let mut url = self.url(&parts)?;
        url.set_query(Some("blobs=true"));
        let response = self.get(url, |request| request).await?;
        let text = bounded(response, MOST_BYTES).await?;
        let wrong = |why: &str| FetchError::Answer(format!("hf://{}: the hub's answer {why}", self.repository));
        let description: Description =
            serde_json::from_slice(&text).map_err(|error| wrong(&format!("cannot be read: {error}")))?;
        if !is_digest(&description.sha) {
            return Err(wrong("has no commit"));
        }
        if description.siblings.len() > MOST_FILES {
            return Err(wrong(&format!("names more than {MOST_FILES} files")));
        }
        let asked = &self.revision;
        if is_digest(asked) && !asked.eq_ignore_ascii_case(&description.sha) {
            return Err(wrong(&format!("is about the commit {}, and not about {asked}", description.sha)));
        }
        self.chosen(description)
    }

    /// Chooses the model among the files of a commit.
    fn chosen(&self, description: Description) -> Result<Listing, FetchError> {
        let Description { sha, siblings } = description;
        let models: Vec<&str> =
            siblings.iter().map(|file| &*file.rfilename).filter(|path| is_onnx_name(path)).collect();
        let repository = &self.repository;
        let has = |path: &&str| models.contains(path);
        let chosen = match &self.file {
            Some(file) if has(&file.as_str()) => file.clone(),
            Some(file) => {
                let message = format!("hf://{repository} has no file {file}; its ONNX files: {}", few(&models));
                return Err(FetchError::Missing(message));
            }
            None => match (USUAL.into_iter().find(has), &models[..]) {
                (Some(usual), _) => usual.to_owned(),
                (None, [only]) => (*only).to_owned(),
                (None, []) => return Err(self.without_model()),
                (None, several) => {
                    return Err(FetchError::NoModel(format!(
                        "hf://{repository} has {} ONNX files, and none is model.onnx: {}; name one, such as \
                         hf://{repository}/{}",
                        several.len(),
                        few(several),
                        several[0]
                    )));
                }
            },
        };
        let left: Vec<&str> = models.iter().copied().filter(|path| *path != chosen).collect();
        let note = (!left.is_empty() && self.file.is_none()).then(|| {
            let left = few(&left);
            format!("serving {chosen} of hf://{repository}; other ONNX files there: {left}. hf://{repository}/PATH chooses one")
        });
        let is_companion = |path: &str| COMPANIONS.iter().any(|name| path == *name || path == beside(&chosen, name));
        let (mut files, mut others) = (Vec::new(), Vec::new());
        let folder = chosen.rsplit_once('/').map(|(folder, _)| format!("{folder}/")).unwrap_or_default();
        for sibling in &siblings {
            let Some(file) = remote_file(sibling, &sha) else { continue };
            if sibling.rfilename == chosen {
                files.insert(0, RemoteFile { path: "model.onnx".to_owned(), ..file });
            } else if is_companion(&sibling.rfilename) && file.size.is_some_and(|size| size <= SMALL) {
                let name = sibling.rfilename.rsplit('/').next().unwrap_or_default().to_owned();
                // The one beside the model wins over the one at the top.
                if sibling.rfilename == beside(&chosen, &name) {
                    files.retain(|known: &RemoteFile| known.path != name);
                    files.push(RemoteFile { path: name, ..file });
                } else if files.iter().all(|known| known.path != name) {
                    files.push(RemoteFile { path: name, ..file });
                }
            } else if let Some(inside) = sibling.rfilename.strip_prefix(&folder)
                && check_path(inside).is_ok()
            {
                others.push(RemoteFile { path: inside.to_owned(), ..file });
            }
        }
        Ok(Listing { revision: Some(sha), files, others, note })
    }

    fn without_model(&self) -> FetchError {
        let repository = &self.repository;
        let name = repository.rsplit('/').next().unwrap_or_default();
        FetchError::NoModel(format!(
            "hf://{repository} has no ONNX file; make one, and serve that: pip install 'optimum-onnx[onnxruntime]' && \
             optimum-cli export onnx --model {repository} {name} && downbeat serve {name}"
        ))
    }

    /// The error of external data that the repository does not have.
    pub(crate) fn without(&self, location: &str) -> FetchError {
        let repository = &self.repository;
        FetchError::Missing(format!(
            "hf://{repository}: the model keeps weights in the file '{location}', which the repository does not have"
        ))
    }

    /// Reads a file of the commit. The cache of the hub's own client is asked first.
    pub(crate) async fn read(&self, file: &RemoteFile, from: u64) -> Result<Body, FetchError> {
        if let Some(body) = self.of_client(file, from) {
            return Ok(body);
        }
        let (commit, path) = file.locator.split_once(':').unwrap_or_default();
        let mut parts: Vec<&str> = self.repository.split('/').collect();
        parts.extend(["resolve", commit]);
        parts.extend(path.split('/'));
        let range = |request: RequestBuilder| match from {
            0 => request,
            from => request.header("range", format!("bytes={from}-")),
        };
        // A commit does not change, and the digest is checked: no validator is needed.
        body(self.get(self.url(&parts)?, range).await?, from)
    }

    /// The file in the cache of the hub's own client.
    fn of_client(&self, file: &RemoteFile, from: u64) -> Option<Body> {
        use std::io::{Read, Seek, SeekFrom};
        let (Some(Expected::Sha256(name) | Expected::GitBlob(name)), Some(size)) = (&file.expected, file.size) else {
            return None;
        };
        let path = self.known.as_ref()?.join("blobs").join(name);
        let mut opened = fs::File::open(&path).ok()?;
        if opened.metadata().ok()?.len() != size {
            return None;
        }
        opened.seek(SeekFrom::Start(from)).ok()?;
        tracing::info!(file = %file.path, from = %path.display(), "taken from the hub client's cache");
        let chunks = std::iter::from_fn(move || {
            let mut buffer = vec![0; 1 << 18];
            match opened.read(&mut buffer) {
                Ok(0) => None,
                Ok(read) => {
                    buffer.truncate(read);
                    Some(Ok(bytes::Bytes::from(buffer)))
                }
                Err(error) => Some(Err(error.to_string())),
            }
        });
        Some(Body { from, size: Some(size), bytes: Box::pin(futures_util::stream::iter(chunks)) })
    }
}

/// A file of a commit; `None` if its path is none that could be written.
fn remote_file(sibling: &Sibling, commit: &str) -> Option<RemoteFile> {
    check_path(&sibling.rfilename).ok()?;
    let size = sibling.lfs.as_ref().and_then(|lfs| lfs.size).or(sibling.size);
    let expected = match (&sibling.lfs, &sibling.blob) {
        (Some(lfs), _) => Some(Expected::Sha256(lfs.sha256.clone())),
        (None, Some(blob)) => Some(Expected::GitBlob(blob.clone())),
        (None, None) => None,
    };
    let expected = expected.filter(|(Expected::Sha256(name) | Expected::GitBlob(name))| is_digest(name));
    let (path, locator) = (sibling.rfilename.clone(), format!("{commit}:{}", sibling.rfilename));
    // A commit does not change.
    Some(RemoteFile { path, tag: Some(commit.to_owned()), locator, size, expected })
}

/// The text of an answer of at most `most` bytes.
async fn bounded(mut response: Response, most: usize) -> Result<Vec<u8>, FetchError> {
    let mut text = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| no_answer(&error))? {
        if text.len() + chunk.len() > most {
            return Err(FetchError::Answer(format!("the hub's answer has more than {most} bytes")));
        }
        text.extend_from_slice(&chunk);
    }
    Ok(text)
}
