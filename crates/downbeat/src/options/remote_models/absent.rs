//! The place of `remote_models` in a build without the feature `remote`.

use std::sync::Arc;

use downbeat_repository::Supply;
use downbeat_service::options::RemoteOptions;

/// No build without the feature brings models.
///
/// # Errors
/// Always, with the remedy.
pub fn supply(address: &str, _options: &RemoteOptions) -> anyhow::Result<Arc<dyn Supply>> {
    anyhow::bail!(
        "'{address}': this build of downbeat brings no models from other machines; build it with the feature remote \
         (it is on by default), or copy the models to this machine"
    )
}
