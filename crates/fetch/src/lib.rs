//! Brings models from a hub, from object stores and from the web to a folder of this machine.
//!
//! [`open`] turns an address such as `hf://org/name` into a [`Supply`]. The supply looks for the
//! present files, downloads the missing ones into a cache, and returns a folder that
//! `downbeat-repository` reads. The rest of the server knows no network.
//!
//! ```text
//! address -> look: files, sizes, digests -> download: lock, resume, check -> snapshot: links to the files
//! ```
//!
//! The cache has three parts. `blobs/` has each file once, under its SHA-256. `sources/KEY/` has, for
//! each address, the list of its files, downloads under way, and snapshots. A snapshot never changes.
//! Models in service read one snapshot while the next one is made.

mod address;
mod aws_profile;
mod body;
mod cache;
mod digest;
mod download;
mod failure;
mod hub;
mod listing;
mod manifest;
mod remote;
mod store;
mod supply;
mod web;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use downbeat_engine::user_cache;
use downbeat_repository::Supply;

pub use failure::FetchError;

/// The settings that all supplies of a server share.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// The folder of the cache; `None`: the user's folder for caches.
    pub cache: Option<PathBuf>,
    /// Whether models come from the cache alone.
    pub offline: bool,
    /// A server that keeps silent for longer is one that does not answer.
    pub timeout: Duration,
    /// Where progress is shown on a terminal.
    pub bars: indicatif::MultiProgress,
    /// The environment: credentials, endpoints and folders, by the names that other tools use.
    pub variables: BTreeMap<String, String>,
}

impl FetchOptions {
    /// A variable of the environment that is set and not empty.
    fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The user's folder for caches.
    fn user_cache(&self) -> Option<PathBuf> {
        user_cache(|name| self.variable(name).map(OsString::from))
    }

    /// The folder of the cache.
    fn cache_folder(&self) -> PathBuf {
        let of_user = || self.user_cache().unwrap_or_else(std::env::temp_dir).join("downbeat");
        self.cache.clone().unwrap_or_else(of_user)
    }
}

/// The supply of the models at an address.
///
/// # Errors
/// If the address names no source that is known, or the environment contradicts itself.
pub fn open(address: &str, options: FetchOptions) -> Result<Arc<dyn Supply>, FetchError> {
    // rustls must be told the provider of its algorithms. The program has ring alone.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Ok(Arc::new(supply::RemoteSupply::open(address, options)?))
}
