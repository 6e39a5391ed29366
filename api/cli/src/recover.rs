//! `towpath recover`: what an operator runs once after a backup of the database was restored, before anything else is started.

use std::collections::BTreeMap;

use towpath_chassis::Chassis;

/// Groups of objects that are named; the rest is counted.
const NAMED: usize = 1000;

/// Objects below one folder that no row knows.
#[derive(Default)]
struct Group {
    objects: u64,
    bytes: u64,
}

/// What the bucket holds, beside what the database knows.
#[derive(Default)]
struct Compared {
    unknown: BTreeMap<String, Group>,
    unnamed: Group,
    missing: u64,
}

pub async fn run(chassis: &Chassis, dry_run: bool) -> anyhow::Result<()> {
    let recovered = towpath_run::recover::recover(chassis, !dry_run).await?;
    let (would, told) = if dry_run { ("would be ", "") } else { ("", "; their histories say so") };
    println!("{} runs wait for a place: their next sandboxes {would}numbered anew", recovered.waiting);
    println!("{} runs may have a sandbox: it {would}fenced and not taken up again{told}", recovered.fenced);
    let (due, _) = towpath_delivery::due(&chassis.db).await?;
    println!("{due} deliveries are due: receivers may see some of them twice, each under the id that it had");
    let compared = compare(chassis).await?;
    println!(
        "{} objects that the database counts on are not in the bucket: what they held is told as damaged when it is read",
        compared.missing
    );
    let all = compared
        .unknown
        .values()
        .chain([&compared.unnamed])
        .fold(Group::default(), |sum, group| Group { objects: sum.objects + group.objects, bytes: sum.bytes + group.bytes });
    println!(
        "{} objects, {} bytes, came after the backup or were left behind; they stay until a person removes them:",
        all.objects, all.bytes
    );
    for (folder, group) in &compared.unknown {
        println!("  {folder}/  {} objects, {} bytes", group.objects, group.bytes);
    }
    if compared.unnamed.objects > 0 {
        println!("  and {} objects, {} bytes in more folders", compared.unnamed.objects, compared.unnamed.bytes);
    }
    println!("Sandboxes that the database does not know are refused when they come; each host logs and counts those that it has.");
    Ok(())
}

/// Page by page: a bucket may hold any number of objects.
async fn compare(chassis: &Chassis) -> anyhow::Result<Compared> {
    let mut compared = Compared::default();
    let (mut after, mut found) = (None::<String>, 0);
    loop {
        let page = chassis.store.list(after.as_deref()).await?;
        let Some(last) = page.last() else { break };
        after = Some(last.key.clone());
        let keys: Vec<String> = page.iter().map(|object| object.key.clone()).collect();
        let (known, live) = towpath_file::known_objects(&chassis.db, &keys).await?;
        found += live;
        for object in page.iter().filter(|object| !known.contains(&object.key)) {
            let folder = object.key.rsplit_once('/').map_or("", |(folder, _)| folder);
            let named = compared.unknown.len() < NAMED || compared.unknown.contains_key(folder);
            let group = if named { compared.unknown.entry(folder.to_owned()).or_default() } else { &mut compared.unnamed };
            group.objects += 1;
            group.bytes += object.size;
        }
    }
    compared.missing = towpath_file::live_objects(&chassis.db).await?.saturating_sub(found);
    Ok(compared)
}
