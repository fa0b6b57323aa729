//! The supply of the models at one address.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use downbeat_repository::{Supply, SupplyError, is_onnx_name};
use futures_util::{StreamExt, TryStreamExt};
use indicatif::HumanBytes;
use rustix::process::Signal;

use crate::FetchOptions;
use crate::address::{Address, HUB};
use crate::cache::{Cache, Lock};
use crate::digest::Expected;
use crate::download::download;
use crate::failure::FetchError;
use crate::hub::Hub;
use crate::listing::{Listing, RemoteFile, beside, check_tree};
use crate::manifest::{CachedFile, Manifest};
use crate::remote::Remote;
use crate::store::Store;
use crate::web::{Web, shown};

/// Most files of a source that come at a time.
const SIDE_BY_SIDE: usize = 4;

/// How often a source is looked up anew after its files changed under a download.
const MOST_LOOKS: u32 = 3;

/// The supply of the models at one address.
#[derive(Debug)]
pub(crate) struct RemoteSupply {
    address: String,
    name: String,
    options: FetchOptions,
    remote: Remote,
    cache: Cache,
    /// The snapshots that this process may use, so that no other process removes them.
    used: Mutex<Vec<(PathBuf, Lock)>>,
}

impl RemoteSupply {
    pub(crate) fn open(text: &str, options: FetchOptions) -> Result<Self, FetchError> {
        let hub = options.variable("HF_ENDPOINT").unwrap_or(HUB);
        let address = Address::parse(text, hub)?;
        let (name, shown) = match &address {
            Address::Web(url) => (address.name(), shown(url)),
            Address::Hub { .. } | Address::Store(_) => (address.name(), text.to_owned()),
        };
        let client = reqwest::Client::builder()
            .user_agent(concat!("downbeat/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(options.timeout)
            .read_timeout(options.timeout)
            .build()
            .map_err(|error| FetchError::Address(format!("no client for HTTP: {}", crate::remote::words(&error))))?;
        let is_hub = matches!(address, Address::Hub { .. });
        let remote = match address {
            Address::Hub { repository, revision, file } => {
                Remote::Hub(Hub::new((repository, revision, file), &options, client)?)
            }
            Address::Store(url) => Remote::Store(Store::new(url, &options)?),
            Address::Web(url) => Remote::Web(Web::new(url, client)),
        };
        // The same names are other models on another server.
        let endpoints = ["HF_ENDPOINT", "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_ENDPOINT"];
        let endpoints: Vec<&str> = endpoints.iter().filter_map(|name| options.variable(name)).collect();
        let cache = Cache::new(options.cache_folder(), &format!("{shown} {}", endpoints.join(" ")));
        let asked = options.variable("HF_HUB_OFFLINE").is_some_and(|text| !matches!(text, "0" | "false"));
        let options = FetchOptions { offline: options.offline || is_hub && asked, ..options };
        Ok(RemoteSupply { address: shown, name, options, remote, cache, used: Mutex::default() })
    }

    /// Brings the models: looks, downloads, and makes a snapshot.
    async fn bring_now(&self) -> Result<PathBuf, FetchError> {
        // Beyond a limit of the process, writing ends with an error in place of the process.
        let limit = tokio::signal::unix::SignalKind::from_raw(Signal::XFSZ.as_raw());
        let _limit = tokio::signal::unix::signal(limit);
        let locks = self.cache.lock(&self.address)?;
        let before = Manifest::read(&self.cache.manifest());
        let mut looks = 1;
        let manifest = loop {
            match self.present(before.clone()).await {
                Err(FetchError::Changed(file)) if looks < MOST_LOOKS => {
                    tracing::warn!(%file, "the file changed while it was downloaded; looking again");
                    looks += 1;
                }
                outcome => break outcome?,
            }
        };
        let (folder, lock) = self.cache.snapshot(&manifest, &self.name)?;
        if before.as_ref() != Some(&manifest) {
            manifest.write(&self.cache.manifest())?;
        }
        self.cache.prune(&manifest.snapshot, locks);
        if let Ok(mut used) = self.used.lock()
            && used.iter().all(|(known, _)| *known != folder)
        {
            // The models in service may still read from the one before.
            used.push((folder.clone(), lock));
            let old = used.len().saturating_sub(2);
            used.drain(..old);
        }
        Ok(folder)
    }

    /// The present files, all of them in the cache.
    async fn present(&self, before: Option<Manifest>) -> Result<Manifest, FetchError> {
        let address = &self.address;
        if self.options.offline {
            let cached = before.and_then(|before| self.cached(before));
            let missing = "the cache does not have all files, and the server is started offline";
            let cached = cached.ok_or_else(|| FetchError::Offline(missing.to_owned()))?;
            tracing::info!(%address, "offline: serving the files in the model cache");
            return Ok(cached);
        }
        let outcome = match self.remote.look().await {
            Ok(listing) => self.fill(listing, before.as_ref()).await,
            Err(error) => Err(error),
        };
        match outcome {
            Err(error) if error.is_passing() => match before.and_then(|before| self.cached(before)) {
                Some(cached) => {
                    tracing::warn!(%address, %error, "serving the files in the model cache, which may be old");
                    Ok(cached)
                }
                None => Err(error),
            },
            outcome => outcome,
        }
    }

    /// The list of the last look, if the cache has all its files.
    fn cached(&self, mut before: Manifest) -> Option<Manifest> {
        before.files.iter_mut().all(|file| self.cache.has(file)).then_some(before)
    }

    /// Brings the files of a listing, and the external data that its models name.
    async fn fill(&self, listing: Listing, before: Option<&Manifest>) -> Result<Manifest, FetchError> {
        let Listing { revision, mut files, others, note } = listing;
        self.tell(note.as_deref(), revision.as_deref(), before);
        check_tree(&mut files)?;
        let mut cached: Vec<CachedFile> = Vec::new();
        let mut pending = files;
        while !pending.is_empty() {
            let came = self.bring_files(&pending, before).await?;
            let mut next: Vec<RemoteFile> = Vec::new();
            for (file, model) in pending.iter().zip(&came).filter(|(file, _)| is_onnx_name(&file.path)) {
                let blob = self.cache.blob(&model.sha256);
                let external = downbeat_engine::onnx::named_external_files(&blob).map_err(FetchError::cache(&blob))?;
                for location in external {
                    let path = beside(&file.path, &location);
                    let is_known = |known: &str| known == path;
                    if cached.iter().chain(&came).any(|file| is_known(&file.path))
                        || next.iter().any(|f| is_known(&f.path))
                    {
                        continue;
                    }
                    next.push(match others.iter().find(|other| is_known(&other.path)) {
                        Some(other) => other.clone(),
                        None => self.remote.find(file, &location).await?,
                    });
                }
            }
            check_tree(&mut next)?;
            cached.extend(came);
            pending = next;
        }
        cached.sort_by(|a, b| a.path.cmp(&b.path));
        let (address, snapshot) = (self.address.clone(), Manifest::snapshot_name(&cached));
        Ok(Manifest { address, revision, snapshot, files: cached })
    }

    fn tell(&self, note: Option<&str>, revision: Option<&str>, before: Option<&Manifest>) {
        let address = &self.address;
        let known = before.and_then(|before| before.revision.as_deref());
        match (known, revision) {
            (Some(known), Some(now)) if known != now => {
                tracing::info!(%address, "the revision moved from {known} to {now}");
            }
            (None, Some(now)) => tracing::info!(%address, commit = %now, "found"),
            _ => {}
        }
        // A choice that did not change is no news.
        if let Some(note) = note.filter(|_| known != revision || before.is_none()) {
            tracing::info!("{note}");
        }
    }

    /// Brings these files into the cache, in this order.
    async fn bring_files(
        &self,
        files: &[RemoteFile],
        before: Option<&Manifest>,
    ) -> Result<Vec<CachedFile>, FetchError> {
        let mut cached: Vec<Option<CachedFile>> = files.iter().map(|file| self.in_cache(file, before)).collect();
        let missing: Vec<&RemoteFile> =
            files.iter().zip(&cached).filter(|(_, cached)| cached.is_none()).map(|(file, _)| file).collect();
        let bytes = missing.iter().fold(0_u64, |sum, file| sum.saturating_add(file.size.unwrap_or(0)));
        self.cache.check_space(bytes)?;
        if !missing.is_empty() {
            let (address, size) = (&self.address, HumanBytes(bytes));
            tracing::info!(%address, files = missing.len(), %size, "downloading");
        }
        let downloads = missing.into_iter().map(|file| download(&self.remote, &self.cache, file, &self.options.bars));
        let came = futures_util::stream::iter(downloads).buffered(SIDE_BY_SIDE).try_collect::<Vec<_>>().await?;
        let mut came = came.into_iter();
        Ok(cached.iter_mut().filter_map(|known| known.take().or_else(|| came.next())).collect())
    }

    /// The file in the cache, if it is the listed one.
    fn in_cache(&self, file: &RemoteFile, before: Option<&Manifest>) -> Option<CachedFile> {
        let known = before.and_then(|before| before.same(file)).cloned();
        let known = known.filter(|known| match &file.expected {
            Some(Expected::Sha256(sha256)) => sha256.eq_ignore_ascii_case(&known.sha256),
            _ => true,
        });
        let known = known.and_then(|mut known| self.cache.has(&mut known).then_some(known));
        let elsewhere = || match &file.expected {
            Some(Expected::Sha256(sha256)) => self.cache.find(&sha256.to_ascii_lowercase(), file.size),
            _ => None,
        };
        let RemoteFile { path, locator, tag, .. } = file.clone();
        known.or_else(elsewhere).map(|known| CachedFile { path, locator, tag, ..known })
    }
}

impl Supply for RemoteSupply {
    fn bring(&self) -> Result<PathBuf, SupplyError> {
        // A thread of its own: the caller may be on one of a runtime, which must not wait.
        let bring = || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| format!("no thread for the download: {error}"))?;
            let brought = runtime.block_on(self.bring_now()).map_err(|error| error.to_string());
            runtime.shutdown_timeout(Duration::ZERO);
            brought
        };
        let brought = std::thread::scope(|scope| scope.spawn(bring).join());
        let brought = brought.unwrap_or_else(|_| Err("the download ended in a panic".to_owned()));
        brought.map_err(|message| {
            // The caller names the address.
            let rest = message.strip_prefix(&self.address).map(|rest| rest.strip_prefix(':').unwrap_or(rest));
            let rest = rest.and_then(|rest| rest.strip_prefix(' ')).map(str::to_owned);
            SupplyError { message: rest.unwrap_or(message) }
        })
    }

    fn address(&self) -> &str {
        &self.address
    }
}
