//! The CPU divided into partitions: sets of cores.

use super::{CoreSet, Topology};
use crate::traits::Share;
use crate::traits::division::{Division, DivisionError, Part};

/// The most sets that [`divide_freely`] makes by itself: a server can distinguish this many.
const MOST_SETS: usize = 64;

/// Reads and checks sets of cores, one for each partition.
pub(crate) fn divide(asked: &[String], topology: &Topology) -> Result<Division, DivisionError> {
    let cores = topology.cores_of(topology.usable()).count();
    if asked.len() > cores {
        return Err(DivisionError::too_many(asked.len(), cores, "cores that this process may use"));
    }
    let mut sets: Vec<CoreSet> = Vec::new();
    for (index, text) in asked.iter().enumerate() {
        let refused = |reason: String| DivisionError::part(index, text, &reason);
        let set = read(index, text, topology)?;
        for (other, before) in sets.iter().enumerate() {
            let common = set.common(*before);
            if !common.is_empty() {
                return Err(refused(format!("partition {other} has CPU {common}, too; leave it in one of them")));
            }
            if let Some(core) = topology.cores_of(set).find(|core| !core.common(*before).is_empty()) {
                return Err(refused(format!(
                    "the CPUs {core} are hyperthreads of one core, and partition {other} has some of them; put all of them into one partition"
                )));
            }
        }
        sets.push(set);
    }
    Ok(division(&sets, topology))
}

/// Sets of cores that may overlap: the requested sets. Without a request, all runs of neighbouring
/// cores, in steps that keep the number of sets to [`MOST_SETS`].
pub(crate) fn divide_freely(asked: &[String], topology: &Topology) -> Result<Division, DivisionError> {
    let read = |(index, text): (usize, &String)| read(index, text, topology);
    let mut sets = asked.iter().enumerate().map(read).collect::<Result<Vec<CoreSet>, _>>()?;
    if sets.is_empty() {
        let usable = topology.usable();
        let cores: Vec<CoreSet> = topology.cores_of(usable).map(|core| core.common(usable)).collect();
        let runs = |steps: usize| steps * (steps + 1) / 2;
        let step = (1..).find(|step| runs(cores.len().div_ceil(*step)) <= MOST_SETS).unwrap_or(1);
        let steps: Vec<CoreSet> = cores
            .chunks(step)
            .map(|cores| cores.iter().fold(CoreSet::default(), |set, core| set.with(*core)))
            .collect();
        for length in 1..=steps.len() {
            let run = |steps: &[CoreSet]| steps.iter().fold(CoreSet::default(), |set, step| set.with(*step));
            sets.extend(steps.windows(length).map(run));
        }
    }
    Ok(division(&sets, topology))
}

fn read(index: usize, text: &str, topology: &Topology) -> Result<CoreSet, DivisionError> {
    let refused = |reason: String| DivisionError::part(index, text, &reason);
    let set = text.parse::<CoreSet>().map_err(|error| refused(error.to_string()))?;
    check(set, topology).map_err(refused)?;
    Ok(set)
}

fn division(sets: &[CoreSet], topology: &Topology) -> Division {
    let part = |set: &CoreSet| {
        let cores = topology.cores_of(*set).count();
        Part { share: Share::Cores(*set), threads: cores, units: cores as u32, size: format!("CPUs {set}") }
    };
    Division { parts: sets.iter().map(part).collect(), notices: notices(sets, topology) }
}

fn check(set: CoreSet, topology: &Topology) -> Result<(), String> {
    let usable = topology.usable();
    if set.is_empty() {
        return Err(format!("the partition has no core; name some of {usable}"));
    }
    for (known, what) in [
        (topology.present(), "not there"),
        (topology.online(), "switched off"),
        (usable, "not for this process (its affinity, or its container's cpuset)"),
    ] {
        let other = set.without(known);
        if !other.is_empty() {
            return Err(format!("CPU {other} is {what}; there are {usable}"));
        }
    }
    Ok(())
}

/// The CPUs outside of the partitions that may slow them down, a line each.
fn notices(sets: &[CoreSet], topology: &Topology) -> Vec<String> {
    let shared = sets.iter().enumerate().filter_map(|(index, set)| {
        let rest = topology.cores_of(*set).fold(CoreSet::default(), CoreSet::with).without(*set);
        let all = set.with(rest);
        let remedy = if rest.without(topology.usable()).is_empty() {
            format!("write \"{all}\" for whole cores")
        } else {
            "this process may not use them, other processes may".to_owned()
        };
        (!rest.is_empty()).then(|| {
            format!("partition {index} (CPUs {set}) has only some hyperthreads of its cores: work on the CPUs {rest} slows the partition down; {remedy}")
        })
    });
    shared.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four cores with two hyperthreads each. CPU 7 is off, and this process may not use CPU 6.
    fn machine() -> Topology {
        let file = |path: &str| match path {
            "online" => Some("0-6".to_owned()),
            "present" => Some("0-7".to_owned()),
            _ => {
                let cpu: usize = path.strip_prefix("cpu")?.strip_suffix("/topology/core_cpus_list")?.parse().ok()?;
                Some(format!("{},{}", cpu % 4, cpu % 4 + 4))
            }
        };
        Topology::of(file, "0-5".parse().unwrap())
    }

    fn divided(asked: &[&str]) -> Result<Division, String> {
        let asked: Vec<String> = asked.iter().map(|text| (*text).to_owned()).collect();
        divide(&asked, &machine()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_partition_is_its_cores_and_has_a_thread_for_each() {
        let division = divided(&["0,4", "1-2,5"]).unwrap();
        let part = |cores: &str, threads: usize| Part {
            share: Share::Cores(cores.parse().unwrap()),
            threads,
            units: threads as u32,
            size: format!("CPUs {cores}"),
        };
        assert_eq!(division.parts, [part("0,4", 1), part("1-2,5", 2)]);
    }

    #[test]
    fn movable_models_have_overlapping_partitions_of_all_runs_of_cores() {
        let sizes = |asked: &[&str], topology: &Topology| {
            let asked: Vec<String> = asked.iter().map(|text| (*text).to_owned()).collect();
            let parts = divide_freely(&asked, topology).map(|division| division.parts);
            parts.map(|parts| parts.into_iter().map(|part| part.size).collect::<Vec<_>>())
        };
        assert_eq!(sizes(&["0,4", "0-1,4-5"], &machine()).unwrap(), ["CPUs 0,4", "CPUs 0-1,4-5"]);
        assert!(sizes(&["0", "9"], &machine()).is_err());
        let runs = sizes(&[], &machine()).unwrap();
        assert_eq!(runs[..5], ["CPUs 0,4", "CPUs 1,5", "CPUs 2", "CPUs 3", "CPUs 0-1,4-5"]);
        assert_eq!((runs.len(), runs.last().map(String::as_str)), (10, Some("CPUs 0-5")));
        let many = |file: &str| (file == "online" || file == "present").then(|| "0-47".to_owned());
        let many = Topology::of(many, "0-47".parse().unwrap());
        let runs = sizes(&[], &many).unwrap();
        assert_eq!((runs.len(), &*runs[0], runs.last().map(String::as_str)), (55, "CPUs 0-4", Some("CPUs 0-47")));
    }

    #[test]
    fn partitions_that_overlap_are_refused() {
        let error = divided(&["0-1,4-5", "1-2"]).unwrap_err();
        assert_eq!(error, "partition 1, \"1-2\": partition 0 has CPU 1, too; leave it in one of them");
    }

    #[test]
    fn cores_that_are_not_there_off_or_for_others_are_refused() {
        let error = |text| divided(&[text]).unwrap_err();
        assert_eq!(error("0,8-9"), "partition 0, \"0,8-9\": CPU 8-9 is not there; there are 0-5");
        assert_eq!(error("7"), "partition 0, \"7\": CPU 7 is switched off; there are 0-5");
        assert_eq!(
            error("2,6"),
            "partition 0, \"2,6\": CPU 6 is not for this process (its affinity, or its container's cpuset); there are 0-5"
        );
    }

    #[test]
    fn a_partition_without_a_core_is_refused() {
        assert_eq!(divided(&["0", ""]).unwrap_err(), "partition 1, \"\": the partition has no core; name some of 0-5");
    }

    #[test]
    fn hyperthreads_of_one_core_in_two_partitions_are_refused() {
        let error = divided(&["0-1", "4"]).unwrap_err();
        assert!(error.contains("\"4\": the CPUs 0,4 are hyperthreads of one core, and partition 0 has"), "{error}");
    }

    #[test]
    fn more_partitions_than_cores_are_refused() {
        let error = divided(&["0", "1", "2", "3", "4"]).unwrap_err();
        assert_eq!(error, "5 partitions are too many for 4 cores that this process may use");
    }

    #[test]
    fn what_is_no_set_of_cores_is_refused_with_an_example() {
        let error = divided(&["25%"]).unwrap_err();
        assert!(error.starts_with("partition 0, \"25%\": '25%' is neither a number nor a range; expected"), "{error}");
    }

    #[test]
    fn hyperthreads_that_are_left_out_are_said() {
        let notices = divided(&["0,4", "1", "2"]).unwrap().notices;
        let begin = "has only some hyperthreads of its cores: work on the CPUs";
        assert_eq!(
            notices,
            [
                format!("partition 1 (CPUs 1) {begin} 5 slows the partition down; write \"1,5\" for whole cores"),
                format!(
                    "partition 2 (CPUs 2) {begin} 6 slows the partition down; this process may not use them, other processes may"
                ),
            ]
        );
    }
}
