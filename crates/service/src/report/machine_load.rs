//! The other load of a machine, by Linux's own counts.

/// Processor time up to some moment, in the kernel's ticks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Ticks {
    /// Ticks of all cores, idle cores included.
    all: u64,
    /// Ticks of all cores while busy with any process.
    busy: u64,
    /// Ticks of this process.
    own: u64,
}

/// Watches the load of a machine from a moment on.
#[derive(Clone, Copy, Debug)]
pub struct LoadWatch(Option<Ticks>);

impl LoadWatch {
    /// Watches from now on.
    pub fn start() -> Self {
        LoadWatch(ticks())
    }

    /// The share of the machine's processor time that other processes had since the start. `None`
    /// if it is unknown, or the time was too short to tell.
    pub fn others(&self) -> Option<f64> {
        let (before, now) = (self.0?, ticks()?);
        let others = |t: Ticks| t.busy.saturating_sub(t.own);
        share(others(now).saturating_sub(others(before)), now.all.saturating_sub(before.all))
    }

    /// The share of the time that any process had, this one included.
    pub fn all(&self) -> Option<f64> {
        let (before, now) = (self.0?, ticks()?);
        share(now.busy.saturating_sub(before.busy), now.all.saturating_sub(before.all))
    }
}

fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

fn ticks() -> Option<Ticks> {
    let (all, busy) = machine(&std::fs::read_to_string("/proc/stat").ok()?)?;
    Some(Ticks { all, busy, own: own(&std::fs::read_to_string("/proc/self/stat").ok()?)? })
}

/// All and busy ticks, by the first line of `/proc/stat`: user, nice, system, idle, iowait, irq,
/// softirq, steal, and guests. The first two include guests already. Stolen time is busy: another
/// machine had the core.
fn machine(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let numbers: Vec<u64> = line.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
    let all: u64 = numbers.iter().sum();
    let idle = numbers.get(3)? + numbers.get(4)?;
    Some((all, all - idle))
}

/// User and system ticks, by `/proc/self/stat`. The second field, the program's name, may hold
/// anything.
fn own(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// The processor's name, if the system tells it.
pub fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    // Arm's kernels give no name.
    named("model name").or_else(|| named("CPU part")).unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_counts_are_read() {
        let stat = "cpu  100 1 50 800 20 2 3 24 0 0\ncpu0 1 2 3 4\n";
        assert_eq!(machine(stat), Some((1000, 180)));
        assert_eq!((machine("cpu  1 2 3"), machine("nothing"), machine("")), (None, None, None));
        let stat = "42 (a (strange) name) S 1 2 3 4 5 6 7 8 9 10 70 7 0 0 20 0";
        assert_eq!(own(stat), Some(77));
        assert_eq!((own("42 (x) S 1"), own("")), (None, None));
    }

    #[test]
    fn a_moment_of_no_length_tells_nothing() {
        let watch = LoadWatch(Some(Ticks { all: u64::MAX, busy: u64::MAX, own: 0 }));
        assert_eq!((watch.others(), watch.all()), (None, None), "nor do counts that went back");
        assert_eq!(LoadWatch(None).others(), None);
    }
}
