//! How much memory this process may have, and how it gives memory back.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::options::ServerOptions;

/// The kernel's file about the machine's memory.
const MEMINFO: &str = "/proc/meminfo";
/// The kernel's file about the control groups of this process.
const CGROUPS: &str = "/proc/self/cgroup";
/// The folder where control groups are mounted.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Has the allocator give memory back that nothing holds.
static RELEASE: OnceLock<fn()> = OnceLock::new();

/// Sets the function by which the program's allocator gives memory back. The server calls it in
/// idle times. Only the first call counts.
pub fn set_release(release: fn()) {
    // A second call changes nothing, as the allocator is the same.
    let _ = RELEASE.set(release);
}

/// Gives free memory back, if the program has set a function for it.
pub fn release() {
    if let Some(release) = RELEASE.get() {
        release();
    }
}

/// Gives up the pages of the program's own code.
static RELEASE_CODE: OnceLock<fn()> = OnceLock::new();

/// Sets the function by which the program gives up the pages of its code. The server calls it once
/// models are loaded: most of the code that loads them does not run again. Only the first call
/// counts.
pub fn set_release_code(release: fn()) {
    // A second call changes nothing, as the program is the same.
    let _ = RELEASE_CODE.set(release);
}

/// Gives back the memory that loads have left, and the pages of their code.
pub fn release_loads() {
    release();
    if let Some(release) = RELEASE_CODE.get() {
        release();
    }
}

/// The default budget of bytes in flight if the system does not tell its memory.
const FALLBACK_BUDGET: u64 = 1 << 30;
/// The least default budget: one HTTP body of the default largest size, with room beside it.
const LEAST_BUDGET: u64 = 128 << 20;

/// The default budget of bytes in flight: a quarter of the memory this process may have, and at
/// most half of the free memory at the start. The process may have the machine's memory, or the
/// limit of its control groups if that is less. Models have the rest.
pub fn default_budget() -> u64 {
    let meminfo = read(Path::new(MEMINFO)).unwrap_or_default();
    budget_of(allowed(), kilobytes(&meminfo, "MemAvailable"))
}

/// The bytes that this process may have: the machine's, or the limit of its control groups if that
/// is less. `None` if the system does not tell.
pub fn allowed() -> Option<u64> {
    let meminfo = read(Path::new(MEMINFO)).unwrap_or_default();
    let groups = read(Path::new(CGROUPS)).unwrap_or_default();
    least(kilobytes(&meminfo, "MemTotal"), group_limit(&groups, read))
}

fn least(total: Option<u64>, group: Option<u64>) -> Option<u64> {
    total.into_iter().chain(group).min()
}

/// The bytes that the runs of all models may take together; `None`: no limit.
pub fn run_budget(options: &ServerOptions) -> Option<u64> {
    let budget = options.run_memory_bytes.map_or_else(default_budget, |bytes| bytes as u64);
    Some(budget).filter(|bytes| *bytes > 0)
}

fn read(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

fn budget_of(allowed: Option<u64>, free: Option<u64>) -> u64 {
    let shares = allowed.map(|bytes| bytes / 4).into_iter().chain(free.map(|bytes| bytes / 2));
    shares.min().map_or(FALLBACK_BUDGET, |bytes| bytes.max(LEAST_BUDGET))
}

/// A line of `/proc/meminfo`, in bytes.
fn kilobytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least limit in bytes of the control groups in `groups` (the text of `/proc/self/cgroup`) and
/// their parents, version 1 or 2; `None` if there is no limit.
fn group_limit(groups: &str, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let mut least = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(group)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let (root, file) = if controllers.is_empty() {
            (PathBuf::from(CGROUP_ROOT), "memory.max")
        } else if controllers.split(',').any(|controller| controller == "memory") {
            (Path::new(CGROUP_ROOT).join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        // In a container the group's path is often that of the host, and the container's own group
        // is mounted at the root.
        for above in Path::new(group.trim_start_matches('/')).ancestors() {
            // "max" is no number: no limit. Version 1 has a number near 2^63 for that, which the
            // machine's memory beats.
            let limit = read(&root.join(above).join(file)).and_then(|text| text.trim().parse::<u64>().ok());
            least = least.into_iter().chain(limit).min();
        }
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_of_machine_and_groups_counts() {
        const GIB: u64 = 1 << 30;
        assert_eq!(least(Some(64 * GIB), Some(8 * GIB)), Some(8 * GIB));
        assert_eq!(least(None, Some(4096)), Some(4096));
        assert_eq!(budget_of(Some(64 * GIB), Some(60 * GIB)), 16 * GIB);
        assert_eq!(budget_of(Some(8 * GIB), Some(60 * GIB)), 2 * GIB);
        assert_eq!(budget_of(Some(64 * GIB), Some(4 * GIB)), 2 * GIB);
        assert_eq!(budget_of(Some(4096), None), LEAST_BUDGET);
        assert_eq!(budget_of(None, None), FALLBACK_BUDGET);
    }

    #[test]
    fn the_files_of_the_kernel_are_read() {
        let meminfo = "MemTotal:       24684000 kB\nMemFree:  1 kB\nMemAvailable:   100 kB\n";
        assert_eq!(kilobytes(meminfo, "MemTotal"), Some(24_684_000 * 1024));
        assert_eq!(kilobytes(meminfo, "MemAvailable"), Some(102_400));
        assert_eq!(kilobytes(meminfo, "Mem"), None);
        let limits = |path: &Path| match path.to_str()? {
            "/sys/fs/cgroup/a/b/memory.max" => Some("max\n".to_owned()),
            "/sys/fs/cgroup/a/memory.max" => Some("2000\n".to_owned()),
            "/sys/fs/cgroup/memory/c/memory.limit_in_bytes" => Some("3000\n".to_owned()),
            "/sys/fs/cgroup/memory.max" => Some("9000\n".to_owned()),
            _ => None,
        };
        assert_eq!(group_limit("0::/a/b\n", limits), Some(2000));
        assert_eq!(group_limit("0::/elsewhere\n", limits), Some(9000));
        assert_eq!(group_limit("4:memory:/c/d\n1:cpu:/c\n", limits), Some(3000));
        assert_eq!(group_limit("1:cpu:/a\nnonsense\n", limits), None);
    }
}
