//! Errors of emulated devices: a model, a policy or a run that cannot exist.

use downbeat_core::device::BadSegmentProfile;
use downbeat_core::profile::ProfileError;

use downbeat_sim::BadArrivals;

/// The reason, in words, why there is no such model, policy, calibration, run or figure.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeviceFailure(pub(super) String);

/// Finds the value with the name `text`.
pub(super) fn named<T: Copy, const N: usize>(
    what: &str,
    all: [T; N],
    name: impl Fn(T) -> &'static str,
    text: &str,
) -> Result<T, DeviceFailure> {
    let unknown = || DeviceFailure(format!("'{text}' is no {what}; there are {}", all.map(&name).join(", ")));
    all.into_iter().find(|one| name(*one) == text).ok_or_else(unknown)
}

impl From<BadArrivals> for DeviceFailure {
    fn from(bad: BadArrivals) -> Self {
        DeviceFailure(bad.to_string())
    }
}

impl From<ProfileError> for DeviceFailure {
    fn from(bad: ProfileError) -> Self {
        DeviceFailure(bad.to_string())
    }
}

impl From<BadSegmentProfile> for DeviceFailure {
    fn from(bad: BadSegmentProfile) -> Self {
        DeviceFailure(bad.to_string())
    }
}
