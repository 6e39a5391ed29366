//! What the kernel says about processes, read so that "could not find out" never looks like "gone" (invariant UNSURE).

use std::{fs, io};

/// /proc/sys/kernel/random/boot_id.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Inode of a process's PID namespace; `self` for our own.
pub fn pid_namespace(process: &str) -> io::Result<u64> {
    let link = fs::read_link(format!("/proc/{process}/ns/pid"))?;
    let text = link.to_string_lossy();
    text.strip_prefix("pid:[")
        .and_then(|rest| rest.strip_suffix(']'))
        .and_then(|number| number.parse().ok())
        .ok_or_else(|| io::Error::other(format!("{text} is not a PID namespace")))
}

/// The fields of /proc/PID/stat (proc(5)) that tell one process from a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessStat {
    pub state: char,
    pub parent: i32,
    pub threads: i64,
    /// Field 22: clock ticks since boot.
    pub start: u64,
}

/// None when there is no such process.
pub fn process_stat(pid: i32) -> io::Result<Option<ProcessStat>> {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(text) => parse_stat(&text).map(Some).ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat cannot be read: {text:?}"))),
        // ESRCH: it ended between open and read.
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse_stat(text: &str) -> Option<ProcessStat> {
    // The name stands in parentheses and may itself hold spaces and parentheses.
    let (_, rest) = text.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    Some(ProcessStat {
        state: fields.first()?.chars().next()?,
        parent: fields.get(1)?.parse().ok()?,
        threads: fields.get(17)?.parse().ok()?,
        start: fields.get(19)?.parse().ok()?,
    })
}

/// Whether that very process still runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alive {
    Yes,
    /// It does not, and how that is known.
    No(String),
    /// The question has no answer, and why.
    Unknown(String),
}

/// Looks for the process with this number and this start time.
pub fn alive(pid: i32, start: u64) -> Alive {
    if fs::metadata("/proc/self/stat").is_err() {
        return Alive::Unknown("/proc is not mounted".to_owned());
    }
    match process_stat(pid) {
        Err(error) => Alive::Unknown(format!("/proc/{pid}/stat: {error}")),
        Ok(None) => Alive::No(format!("process {pid} does not exist")),
        Ok(Some(stat)) if stat.start != start => Alive::No(format!("process {pid} started at {} and not at {start}", stat.start)),
        // A leader may be a zombie while other threads of it still run; only the last one ends the namespace.
        Ok(Some(stat)) if matches!(stat.state, 'Z' | 'X') && stat.threads <= 1 => Alive::No(format!("process {pid} has ended")),
        Ok(Some(_)) => Alive::Yes,
    }
}

/// All processes below `ancestor`, itself left out.
pub fn descendants(ancestor: i32) -> Vec<i32> {
    let mut parents = Vec::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok())
            && let Ok(Some(stat)) = process_stat(pid)
        {
            parents.push((pid, stat.parent));
        }
    }
    let mut found = vec![ancestor];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(parents.iter().filter(|(_, of)| *of == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found.split_off(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_shift_the_fields() {
        let text = "42 (a) b (c)) S 7 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 3 0 98765 1 1";
        assert_eq!(parse_stat(text), Some(ProcessStat { state: 'S', parent: 7, threads: 3, start: 98765 }));
    }

    #[test]
    fn a_process_with_the_same_number_and_another_start_is_not_the_same() {
        let pid = std::process::id() as i32;
        let start = process_stat(pid).expect("stat").expect("self").start;
        assert_eq!(alive(pid, start), Alive::Yes);
        assert!(matches!(alive(pid, start + 1), Alive::No(_)));
    }
}
