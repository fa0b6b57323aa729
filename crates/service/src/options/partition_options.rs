//! The partitions that the options name for models.

use anyhow::{bail, ensure};
use downbeat_core::DeviceKind;

use crate::options::{ServerOptions, SharesBy};

/// The most partitions of a device.
pub const MOST_PARTITIONS: usize = DeviceKind::LARGEST.0 as usize + 1;

impl ServerOptions {
    /// Checks that the partitions exist that the options name for models.
    ///
    /// # Errors
    /// The missing partition, with a remedy.
    pub fn check_partitions(&self) -> anyhow::Result<()> {
        let count = self.device.partitions.len();
        let are_made = self.device.shares == SharesBy::Auto && count == 0;
        ensure!(
            count <= MOST_PARTITIONS,
            "[device] partitions: {count} are too many; at most {MOST_PARTITIONS} are supported"
        );
        if let Some((name, _)) =
            self.models.iter().find(|(_, model)| model.partitions.as_ref().is_some_and(Vec::is_empty))
        {
            bail!("[models.{name}] partition names none; leave it out to have one chosen");
        }
        for (name, there) in self.placed_by_hand() {
            for (index, partition) in there.iter().enumerate() {
                ensure!(
                    count > 0 || are_made,
                    "[models.{name}] partition is {partition}, and the devices are not divided; name partitions in [device] partitions, or leave it out"
                );
                ensure!(
                    are_made || (*partition as usize) < count,
                    "[models.{name}] partition is {partition}; [device] partitions has {count}, numbered from 0 to {}",
                    count.saturating_sub(1)
                );
                ensure!(!there[..index].contains(partition), "[models.{name}] partition has {partition} twice");
            }
            ensure!(
                there.len() == 1 || self.device.shares == SharesBy::Fixed,
                "[models.{name}] partition names {}, and with shares = \"auto\" a model is on one at a time; name one, or none",
                there.len()
            );
        }
        Ok(())
    }

    /// The partitions of models whose options name some.
    pub fn placed_by_hand(&self) -> impl Iterator<Item = (&String, &[u32])> {
        let named = self.models.iter().filter_map(|(name, model)| Some((name, model.partitions.as_deref()?)));
        named.filter(|(_, there)| !there.is_empty())
    }
}
