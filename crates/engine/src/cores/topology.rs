//! The machine's CPUs, the cores whose hyperthreads they are, and the CPUs that this process may
//! use.

use std::collections::BTreeSet;
use std::path::Path;

use super::CoreSet;

/// The kernel's folder about CPUs.
const FOLDER: &str = "/sys/devices/system/cpu";

/// The machine's CPUs, the cores whose hyperthreads they are, and the CPUs that this process may
/// use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    present: CoreSet,
    online: CoreSet,
    usable: CoreSet,
    /// The online cores, in the order of their first CPUs.
    cores: Vec<CoreSet>,
}

impl Topology {
    /// The topology of this machine. The calling thread must be as unbound as the process.
    pub fn here() -> Topology {
        let file = |name: &str| std::fs::read_to_string(Path::new(FOLDER).join(name)).ok();
        Topology::of(file, usable())
    }

    /// The topology in the files of `/sys/devices/system/cpu`. `file` returns a file's text by its
    /// path in the folder. Without these files only the `usable` CPUs are known, and each counts as
    /// a core.
    pub fn of(file: impl Fn(&str) -> Option<String>, usable: CoreSet) -> Topology {
        let list = |name: &str| file(name)?.parse::<CoreSet>().ok();
        let online = list("online").unwrap_or_default().with(usable);
        let present = list("present").unwrap_or_default().with(online);
        let core_of = |cpu: usize| {
            // `core_cpus_list` is the newer name.
            let names = ["core_cpus_list", "thread_siblings_list"];
            let siblings = names.iter().find_map(|name| list(&format!("cpu{cpu}/topology/{name}")));
            siblings.unwrap_or_default().with(CoreSet::from_iter([cpu])).common(online)
        };
        let first = |core: &CoreSet| core.iter().next();
        let distinct: BTreeSet<_> = online.iter().map(core_of).map(|core| (first(&core), core)).collect();
        Topology { present, online, usable, cores: distinct.into_iter().map(|(_, core)| core).collect() }
    }

    /// The CPUs that this process may use: its affinity, which a container's cpuset bounds.
    pub fn usable(&self) -> CoreSet {
        self.usable
    }

    /// The CPUs of the machine, even those that are switched off.
    pub fn present(&self) -> CoreSet {
        self.present
    }

    /// The CPUs that are switched on.
    pub fn online(&self) -> CoreSet {
        self.online
    }

    /// The cores that have one of these CPUs, each with all its hyperthreads.
    pub fn cores_of(&self, cpus: CoreSet) -> impl Iterator<Item = CoreSet> {
        self.cores.iter().copied().filter(move |core| !core.common(cpus).is_empty())
    }
}

/// The CPUs that the calling thread may use. If the kernel does not say, the first of as many CPUs
/// as the standard library counts.
fn usable() -> CoreSet {
    let Ok(affinity) = rustix::thread::sched_getaffinity(None) else {
        return (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
    };
    (0..CoreSet::LIMIT).filter(|cpu| affinity.is_set(*cpu)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CoreSet {
        text.parse().unwrap()
    }

    /// A machine with these `online` and `present` CPUs and these siblings.
    fn machine(online: &str, present: &str, cores: &[&str], usable: &str) -> Topology {
        let cores: Vec<CoreSet> = cores.iter().map(|core| set(core)).collect();
        let file = |path: &str| match path {
            "online" => Some(format!("{online}\n")),
            "present" => Some(format!("{present}\n")),
            _ => {
                let cpu = path.strip_prefix("cpu")?.strip_suffix("/topology/thread_siblings_list")?.parse().ok()?;
                Some(format!("{}\n", cores.iter().find(|core| core.contains(cpu))?))
            }
        };
        Topology::of(file, set(usable))
    }

    fn cores(topology: &Topology, cpus: &str) -> Vec<String> {
        topology.cores_of(set(cpus)).map(|core| core.to_string()).collect()
    }

    #[test]
    fn hyperthreads_of_a_core_stay_together() {
        let topology = machine("0-7", "0-7", &["0,4", "1,5", "2,6", "3,7"], "0-7");
        assert_eq!(cores(&topology, "0-7"), ["0,4", "1,5", "2,6", "3,7"]);
        assert_eq!(cores(&topology, "1-2"), ["1,5", "2,6"]);
    }

    /// Core numbers (`core_id`) repeat in each socket; the lists of siblings do not.
    #[test]
    fn cores_of_two_sockets_are_apart() {
        let topology = machine("0-7", "0-7", &["0,4", "2,6", "1,5", "3,7"], "0-7");
        assert_eq!(cores(&topology, "0-7"), ["0,4", "1,5", "2,6", "3,7"]);
        assert_eq!(topology.cores_of(topology.usable()).count(), 4);
    }

    #[test]
    fn a_cpu_that_is_offline_is_no_part_of_its_core() {
        let topology = machine("0-2", "0-3", &["0,2", "1,3"], "0-2");
        assert_eq!(cores(&topology, "0-3"), ["0,2", "1"]);
        assert_eq!((topology.online(), topology.present()), (set("0-2"), set("0-3")));
    }

    #[test]
    fn a_container_has_some_of_the_cpus_and_sees_their_cores_whole() {
        let topology = machine("0-7", "0-7", &["0,4", "1,5", "2,6", "3,7"], "1-2,5");
        assert_eq!(topology.usable(), set("1-2,5"));
        assert_eq!(cores(&topology, "1-2,5"), ["1,5", "2,6"]);
    }

    #[test]
    fn without_sys_each_usable_cpu_is_a_core() {
        let topology = Topology::of(|_| None, set("0,2-3"));
        assert_eq!(cores(&topology, "0-3"), ["0", "2", "3"]);
        assert_eq!((topology.online(), topology.present()), (set("0,2-3"), set("0,2-3")));
        let garbled = Topology::of(|_| Some("?".to_owned()), set("0-1"));
        assert_eq!(cores(&garbled, "0-1"), ["0", "1"]);
    }

    #[test]
    fn this_machine_has_a_core_for_each_cpu_that_may_be_used() {
        let topology = Topology::here();
        assert!(!topology.usable().is_empty());
        let all = topology.cores_of(topology.usable()).fold(CoreSet::default(), CoreSet::with);
        assert_eq!(topology.usable().without(all), CoreSet::default());
    }
}
