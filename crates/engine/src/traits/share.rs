//! The place of a lane, and its share of a device.

use crate::cores::{CoreSet, Pinned};

/// The place of a lane on the machine. Engines on the CPU ignore the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Number of the device among those that the engine uses, from 0.
    pub device: usize,
    /// The share of the device.
    pub share: Share,
}

/// The share of a device that a lane has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Share {
    /// The share that the model was loaded for ([`crate::LoadOptions::share`]): the whole device, unless
    /// the options say otherwise.
    #[default]
    Whole,
    /// This number of compute units, rounded up to a number that the device can give. Lanes with
    /// the same number share the same units.
    Units(u32),
    /// The compute units that a share of this many units leaves over.
    AllBut(u32),
    /// The partition of this number, from 0, among the partitions of the devices
    /// ([`crate::Engine::divide`]).
    Part(u32),
    /// Cores of the CPU: the work runs on no others.
    Cores(CoreSet),
}

impl Share {
    /// This share; `loaded` if this is [`Share::Whole`].
    pub fn or(self, loaded: Share) -> Share {
        if self == Share::Whole { loaded } else { self }
    }

    /// The cores; `None`: the share is no set of cores.
    pub fn cores(&self) -> Option<&CoreSet> {
        match self {
            Share::Cores(cores) => Some(cores),
            Share::Whole | Share::Units(_) | Share::AllBut(_) | Share::Part(_) => None,
        }
    }

    /// Binds the calling thread to the cores, if the share is a set of cores.
    ///
    /// # Errors
    /// As [`Pinned::to`].
    pub fn pin(&self) -> Result<Option<Pinned>, String> {
        self.cores().map(Pinned::to).transpose()
    }
}
