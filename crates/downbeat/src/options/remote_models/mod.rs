//! Models of other machines, which the crate `fetch` brings.

use std::sync::Arc;

use downbeat_fetch::FetchOptions;
use downbeat_repository::Supply;
use downbeat_service::logging;
use downbeat_service::options::RemoteOptions;

/// The supply of the models at an address.
///
/// # Errors
/// If the address is wrong.
pub fn supply(address: &str, options: &RemoteOptions) -> anyhow::Result<Arc<dyn Supply>> {
    let RemoteOptions { cache, offline, timeout } = options.clone();
    let variables =
        std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    let (bars, variables) = (logging::bars().clone(), variables.collect());
    Ok(downbeat_fetch::open(address, FetchOptions { cache, offline, timeout: timeout.into(), bars, variables })?)
}
