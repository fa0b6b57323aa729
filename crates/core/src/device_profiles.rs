//! How long a model's batches take on each kind of device.

use serde::{Deserialize, Serialize};

use crate::ids::DeviceKind;
use crate::profile::{LatencyProfile, ProfileError};

/// A latency profile for every kind of device that a model runs on. If one [`LatencyProfile`] holds
/// for all kinds, use `profile.into()`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "Profiles")]
pub struct DeviceProfiles(Profiles);

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
enum Profiles {
    /// One profile for every kind, also for a kind that is not known yet.
    Same(LatencyProfile),
    /// A profile for each kind, in order of kinds; at least one profile.
    ByKind(Vec<(DeviceKind, LatencyProfile)>),
}

impl From<LatencyProfile> for DeviceProfiles {
    fn from(profile: LatencyProfile) -> Self {
        DeviceProfiles(Profiles::Same(profile))
    }
}

impl TryFrom<Profiles> for DeviceProfiles {
    type Error = ProfileError;
    fn try_from(profiles: Profiles) -> Result<Self, ProfileError> {
        match profiles {
            Profiles::Same(profile) => Ok(profile.into()),
            Profiles::ByKind(profiles) => Self::by_kind(profiles),
        }
    }
}

impl DeviceProfiles {
    /// A profile for each of these kinds. The model never runs on a device of another kind. If a
    /// kind occurs twice, its first profile counts.
    ///
    /// # Errors
    /// [`ProfileError::Empty`] if `profiles` is empty.
    pub fn by_kind(profiles: impl IntoIterator<Item = (DeviceKind, LatencyProfile)>) -> Result<Self, ProfileError> {
        let mut profiles: Vec<_> = profiles.into_iter().collect();
        profiles.sort_by_key(|(kind, _)| *kind);
        profiles.dedup_by_key(|(kind, _)| *kind);
        if profiles.is_empty() { Err(ProfileError::Empty) } else { Ok(DeviceProfiles(Profiles::ByKind(profiles))) }
    }

    /// The profile on a device of this kind; `None`: the model does not run on this kind.
    pub fn get(&self, kind: DeviceKind) -> Option<&LatencyProfile> {
        match &self.0 {
            Profiles::Same(profile) => Some(profile),
            Profiles::ByKind(profiles) => profiles.iter().find(|(k, _)| *k == kind).map(|(_, profile)| profile),
        }
    }

    /// The profile on the first kind that has a profile. If all devices are alike, it is the only
    /// profile.
    pub fn first(&self) -> &LatencyProfile {
        match &self.0 {
            Profiles::Same(profile) => profile,
            Profiles::ByKind(profiles) => &profiles[0].1,
        }
    }

    /// The profiles, each with its kind. A profile without a kind is for all kinds.
    pub fn iter(&self) -> impl Iterator<Item = (Option<DeviceKind>, &LatencyProfile)> {
        let (same, by_kind) = match &self.0 {
            Profiles::Same(profile) => (Some((None, profile)), &[][..]),
            Profiles::ByKind(profiles) => (None, &profiles[..]),
        };
        same.into_iter().chain(by_kind.iter().map(|(kind, profile)| (Some(*kind), profile)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::Duration;

    fn profile(ms: u64) -> LatencyProfile {
        LatencyProfile::linear(Duration::from_millis(ms), Duration::ZERO, 4).unwrap()
    }

    #[test]
    fn one_profile_is_for_all_kinds() {
        let same = DeviceProfiles::from(profile(3));
        assert_eq!(same.get(DeviceKind(7)), Some(&profile(3)));
        assert_eq!(same.iter().collect::<Vec<_>>(), [(None, &profile(3))]);
    }

    #[test]
    fn a_kind_without_a_profile_has_none() {
        let some =
            DeviceProfiles::by_kind([(2, 5), (0, 3), (2, 9)].map(|(k, ms)| (DeviceKind(k), profile(ms)))).unwrap();
        assert_eq!(some.get(DeviceKind(1)), None);
        assert_eq!(some.first(), &profile(3));
        let expected = [(Some(DeviceKind(0)), &profile(3)), (Some(DeviceKind(2)), &profile(5))];
        assert_eq!(some.iter().collect::<Vec<_>>(), expected);
        assert_eq!(DeviceProfiles::by_kind([]), Err(ProfileError::Empty));
    }
}
