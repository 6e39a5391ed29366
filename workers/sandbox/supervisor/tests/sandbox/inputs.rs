//! Input files, and what the command finds in its environment.

use towpath_schemas::{
    frame::FrameKind,
    guest::{FromGuest, InputFile},
    id::FileId,
};

use crate::world::World;

fn input(file: FileId, name: &str, size: usize) -> InputFile {
    InputFile { file, name: name.to_owned(), media_type: "application/octet-stream".to_owned(), size: size as u64 }
}

#[test]
fn input_files_come_whole_and_read_only_and_those_that_cannot_be_had_are_listed() {
    let script = "cd $TOWPATH_ATTACHMENTS_DIR; sha256sum big.bin; cat small.txt small-2.txt; stat -c %a small.txt; \
                  (echo x >> small.txt) 2>/dev/null || echo kept; (touch new) 2>/dev/null || echo closed; cat $TOWPATH_ATTACHMENTS_MANIFEST >&2";
    let mut world = World::shell(script);
    let big: Vec<u8> = (0..1_000_003_u32).map(|number| (number * 31 % 251) as u8).collect();
    let (a, b, c) = (FileId::mint(), FileId::mint(), FileId::mint());
    world.order.files = vec![
        input(a, "big.bin", big.len()),
        input(b, "small.txt", 4),
        input(b, "small.txt", 4),
        input(c, "missing.txt", 4),
        input(b, "../escape", 4),
    ];
    // An earlier run left a link in the place of the folder.
    std::os::unix::fs::symlink("/tmp", world.workspace.join("files")).expect("link");
    let gateway = world.gateway();
    gateway.put_file(a, &big);
    gateway.put_file(b, b"abc\n");
    world.launch().wait("the end", |heard| heard.has(&FromGuest::Done).then_some(()));
    let heard = gateway.heard();
    let digest = hex::encode(<sha2::Sha256 as sha2::Digest>::digest(&big));
    let printed = String::from_utf8(heard.printed(FrameKind::Stdout)).expect("text");
    assert_eq!(printed, format!("{digest}  big.bin\nabc\nabc\n444\nkept\nclosed\n"));
    let manifest: serde_json::Value = serde_json::from_slice(&heard.printed(FrameKind::Stderr)).expect("manifest");
    let listed: Vec<_> = manifest
        .as_array()
        .expect("array")
        .iter()
        .map(|entry| (entry["name"].as_str(), entry["path"].as_str(), entry["status"].as_str()))
        .collect();
    assert_eq!(
        listed,
        [
            (Some("big.bin"), Some("/workspace/files/big.bin"), None),
            (Some("small.txt"), Some("/workspace/files/small.txt"), None),
            (Some("small-2.txt"), Some("/workspace/files/small-2.txt"), None),
            (Some("missing.txt"), None, Some("unavailable")),
            (Some("../escape"), None, Some("unavailable")),
        ]
    );
}

#[test]
fn the_command_sees_the_documented_environment_and_no_other() {
    let mut world = World::shell("env | sort; cat $TOWPATH_TASK_FILE $TOWPATH_SYSTEM_PROMPT_FILE; pwd; ls -l /proc/self/fd | wc -l");
    world.order.env.insert("OWN".to_owned(), "value".to_owned());
    world.order.instructions = "i".repeat(96 * 1024 + 1);
    let (run, session, epoch) = (world.order.run, world.order.session, world.order.epoch);
    let gateway = world.run();
    let printed = String::from_utf8(gateway.heard().printed(FrameKind::Stdout)).expect("text");
    let expected = format!(
        "HOME=/workspace\nLANG=C.UTF-8\nLOGNAME=agent\nOWN=value\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nPWD=/workspace\n\
         SHELL=/bin/sh\nTERM=xterm-256color\nTOWPATH_AGENT=tested\nTOWPATH_ATTACHMENTS_DIR=/workspace/files\n\
         TOWPATH_ATTACHMENTS_MANIFEST=/run/towpath/attachments.json\nTOWPATH_EPOCH={epoch}\nTOWPATH_IDLE_TIMEOUT_SECONDS=0\nTOWPATH_MODE=one_shot\n\
         TOWPATH_OUTPUTS_DIR=/workspace/outputs\nTOWPATH_RESULT_FILE=/run/towpath/result.md\nTOWPATH_RUN_ID={run}\nTOWPATH_SESSION_ID={session}\n\
         TOWPATH_STEER_FIFO=/run/towpath/steer\nTOWPATH_SYSTEM_PROMPT_FILE=/run/towpath/system_prompt.txt\nTOWPATH_TASK=the task\n\
         TOWPATH_TASK_FILE=/run/towpath/task.txt\nTOWPATH_WORKSPACE=/workspace\nUSER=agent\nthe task{}/workspace\n5\n",
        world.order.instructions
    );
    assert_eq!(printed, expected);
}
