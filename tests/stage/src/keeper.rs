//! The thread that starts servers which must not outlive this process. They get `PR_SET_PDEATHSIG`, and the kernel counts the *thread* that
//! started a process as its parent (prctl(2)): so a thread that never ends does it, and not a test's own, short-lived one.

use std::{
    process::{Child, Command},
    sync::{LazyLock, Mutex, mpsc},
};

use anyhow::{Context, Result};

type Request = (Command, mpsc::Sender<std::io::Result<Child>>);

static KEEPER: LazyLock<Mutex<mpsc::Sender<Request>>> = LazyLock::new(|| {
    let (send, receive) = mpsc::channel::<Request>();
    std::thread::Builder::new()
        .name("stage-keeper".to_owned())
        .spawn(move || {
            for (mut command, answer) in receive {
                if let Err(mpsc::SendError(Ok(mut orphan))) = answer.send(command.spawn()) {
                    orphan.kill().ok();
                }
            }
        })
        .expect("start the thread that starts servers");
    Mutex::new(send)
});

/// Starts the command from the thread that lives as long as this process.
pub(crate) fn spawn(command: Command) -> Result<Child> {
    let (send, receive) = mpsc::channel();
    KEEPER.lock().expect("keeper").send((command, send)).ok().context("the thread that starts servers is gone")?;
    receive.recv().context("the thread that starts servers gave no answer")?.context("spawn")
}
