//! The partitions of devices, and the models on each.

use std::collections::BTreeMap;

use anyhow::{Context, bail, ensure};
use downbeat_engine::{Engine, Part};
use downbeat_service::options::partition_options::MOST_PARTITIONS;
use downbeat_service::options::{ServerOptions, SharesBy};
use parking_lot::Mutex;

/// The partitions, which all devices have alike, and the models on each. A model stays on its
/// partition as long as the server lives, unless it is moved.
pub struct Partitions {
    /// The partitions of each device; none if devices are not divided.
    pub parts: Vec<Part>,
    /// By the models' names.
    placed: Mutex<BTreeMap<String, Spot>>,
    /// The further partitions of a model that is on several, by its name.
    more: BTreeMap<String, Vec<usize>>,
    /// Models move by themselves: each begins on the largest partition.
    are_shared: bool,
}

/// The partition of a model.
#[derive(Clone, Copy)]
struct Spot {
    partition: usize,
    /// The partition before the user moved the model.
    home: Option<usize>,
}

impl Spot {
    fn at(partition: usize) -> Self {
        Spot { partition, home: None }
    }
}

impl Partitions {
    /// Divides the devices of `engine` as the options ask, and logs the partitions.
    ///
    /// # Errors
    /// If they cannot be divided like that, or an option names a missing partition for a model.
    pub fn divide(options: &ServerOptions, engine: &dyn Engine) -> anyhow::Result<Self> {
        options.check_partitions()?;
        let asked = &options.device.partitions;
        let are_shared = options.device.shares == SharesBy::Auto;
        let division = match are_shared {
            true => engine.divide_freely(asked),
            false if asked.is_empty() => Ok(Default::default()),
            false => engine.divide(asked),
        };
        let division = division.context("[device] partitions")?;
        for (index, part) in division.parts.iter().enumerate() {
            tracing::info!(partition = index, size = %part.size, "partition");
        }
        let count = division.parts.len();
        ensure!(
            count <= MOST_PARTITIONS,
            "[device] partitions: {count} are too many; at most {MOST_PARTITIONS} are supported"
        );
        if let Some((name, there)) =
            options.placed_by_hand().find(|(_, there)| are_shared && there[0] as usize >= count)
        {
            bail!("[models.{name}] partition is {}; there are {count}, numbered from 0 to {}", there[0], count - 1);
        }
        for notice in &division.notices {
            tracing::warn!("{notice}");
        }
        let chosen = options.placed_by_hand().map(|(name, there)| (name.clone(), Spot::at(there[0] as usize)));
        let more = |there: &[u32]| there[1..].iter().map(|partition| *partition as usize).collect();
        let more = options.placed_by_hand().map(|(name, there)| (name.clone(), more(there))).collect();
        Ok(Partitions { parts: division.parts, placed: Mutex::new(chosen.collect()), more, are_shared })
    }

    pub fn are_there(&self) -> bool {
        !self.parts.is_empty()
    }

    /// The partition of a model: the one that its options name, else the one with the fewest models
    /// when it was first loaded. `None`: the devices are not divided.
    pub fn of(&self, model: &str) -> Option<(usize, &Part)> {
        let mut placed = self.placed.lock();
        let index = match placed.get(model) {
            Some(spot) => spot.partition,
            None => {
                let models = |index: &usize| placed.values().filter(|other| other.partition == *index).count();
                let units = |index: &usize| self.parts.get(*index).map(|part| std::cmp::Reverse(part.units));
                if self.are_shared {
                    // Its place is not remembered: the model moves, and begins on the largest
                    // partition again if it is loaded again.
                    let largest = (0..self.parts.len()).min_by_key(units)?;
                    return Some((largest, self.parts.get(largest)?));
                }
                let index = (0..self.parts.len()).min_by_key(models)?;
                tracing::info!(%model, partition = index, "partition chosen, as it has the fewest models ([models.{model}] partition chooses another)");
                placed.insert(model.to_owned(), Spot::at(index));
                index
            }
        };
        Some((index, self.parts.get(index)?))
    }

    /// All partitions of a model, first the one that [`of`](Self::of) gives; none if the devices
    /// are not divided.
    pub fn all_of(&self, model: &str) -> Vec<usize> {
        let first = self.of(model).map(|(index, _)| index);
        let more = first.and_then(|_| self.more.get(model)).into_iter().flatten();
        first.into_iter().chain(more.copied()).collect()
    }

    /// The models that the options put onto a partition, where these models move by themselves.
    pub fn by_hand(&self) -> BTreeMap<String, usize> {
        self.placed.lock().iter().map(|(name, spot)| (name.clone(), spot.partition)).collect()
    }

    /// Notes that the user has put a model onto a partition: later loads go there, too.
    pub fn set(&self, model: &str, partition: usize) {
        if let Some(spot) = self.placed.lock().get_mut(model) {
            *spot = Spot { partition, home: spot.home.or(Some(spot.partition)) };
        }
    }

    /// The partition that a model had before the user moved it; `None`: it was not moved.
    pub fn home(&self, model: &str) -> Option<usize> {
        self.placed.lock().get(model)?.home
    }

    /// Puts a model that the user had moved back to its earlier partition.
    pub fn set_free(&self, model: &str) {
        if let Some(spot) = self.placed.lock().get_mut(model) {
            *spot = Spot::at(spot.home.unwrap_or(spot.partition));
        }
    }
}

#[cfg(test)]
impl Partitions {
    /// Makes `count` equal partitions of no size.
    pub fn in_parts(count: u32) -> Self {
        let part =
            |index| Part { share: downbeat_engine::Share::Part(index), threads: 1, units: 1, size: String::new() };
        Partitions {
            parts: (0..count).map(part).collect(),
            placed: Mutex::default(),
            more: BTreeMap::new(),
            are_shared: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use downbeat_engine::Emulated;
    use downbeat_service::options::ModelOptions;

    use super::*;

    fn options(partitions: &[&str], models: &[(&str, u32)]) -> ServerOptions {
        let mut options = ServerOptions::new("models".into());
        options.device.partitions = partitions.iter().map(|text| (*text).to_owned()).collect();
        let model = |(name, partition): &(&str, u32)| {
            ((*name).to_owned(), ModelOptions { partitions: Some(vec![*partition]), ..ModelOptions::default() })
        };
        options.models = models.iter().map(model).collect();
        options
    }

    fn refused(partitions: &[&str], models: &[(&str, u32)]) -> String {
        let divided = Partitions::divide(&options(partitions, models), &Emulated::new());
        format!("{:#}", divided.err().expect("it is refused"))
    }

    #[test]
    fn a_model_is_where_its_options_say_and_others_where_the_fewest_are() {
        let partitions = Partitions::in_parts(3);
        partitions.placed.lock().insert("b".to_owned(), Spot::at(0));
        let of = |model: &str| partitions.of(model).map(|(index, _)| index);
        assert_eq!((of("a"), of("c"), of("b"), of("d"), of("e")), (Some(1), Some(2), Some(0), Some(0), Some(1)));
        assert_eq!((of("a"), of("d")), (Some(1), Some(0)), "they stay");
        partitions.set("a", 2);
        partitions.set("a", 0);
        assert_eq!((of("a"), partitions.home("a"), partitions.home("d")), (Some(0), Some(1), None));
        partitions.set_free("a");
        assert_eq!((of("a"), partitions.home("a")), (Some(1), None), "where it was before all that");
    }

    #[test]
    fn nothing_is_divided_unless_it_is_asked_for() {
        let partitions = Partitions::divide(&options(&[], &[]), &Emulated::new()).unwrap();
        assert_eq!((partitions.of("a"), partitions.are_there()), (None, false));
    }

    #[test]
    fn partitions_that_cannot_be_are_refused_with_the_option() {
        let error = refused(&["x"], &[]);
        assert!(error.starts_with("[device] partitions: partition 0, \"x\": 'x' is neither"), "{error}");
        let error = refused(&["0"; 65], &[]);
        assert_eq!(error, "[device] partitions: 65 are too many; at most 64 are supported");
    }

    #[test]
    fn a_model_on_a_partition_that_there_is_not_is_refused() {
        let error = refused(&["0"], &[("a", 0), ("b", 1)]);
        assert_eq!(error, "[models.b] partition is 1; [device] partitions has 1, numbered from 0 to 0");
        let error = refused(&[], &[("a", 0)]);
        assert!(error.starts_with("[models.a] partition is 0, and the devices are not divided; name"), "{error}");
    }
}
